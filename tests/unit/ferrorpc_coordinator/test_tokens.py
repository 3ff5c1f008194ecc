"""A coordinator's token file that is replaced while it runs."""

import os

import pytest
from ferrorpc_coordinator.state.access import Access
from ferrorpc_coordinator.state.events import Caller
from ferrorpc_coordinator.tokens import TokenFile, read_token_file

from ferrorpc.errors import AuthenticationError
from ferrorpc.wire.identity import Role

OLD, NEW = "old-token-of-workers", "new-token-of-workers"
SOMEBODY = Caller("ipv4:1.2.3.4:5", None)


def test_tokens_follow_the_file_and_a_file_with_errors_changes_nothing(tmp_path, caplog):
    path = tmp_path / "tokens"
    path.write_text(f"worker {OLD}\n")
    access = Access(read_token_file(path))
    file = TokenFile(path, access)
    path.write_text(f"worker {OLD}\nworker {NEW}\n")
    file.reload()
    for token in (OLD, NEW):
        access.check(SOMEBODY, token, "a", Role.WORKER)
    path.write_text("")
    file.reload()
    file.reload()
    assert caplog.text.count("the tokens in use are kept: the token file is empty") == 1
    path.write_text(f"worker {NEW}\n")
    file.reload()
    access.check(SOMEBODY, NEW, "a", Role.WORKER)
    with pytest.raises(AuthenticationError):
        access.check(SOMEBODY, OLD, "a", Role.WORKER)
    path.write_text("")
    file.reload()
    assert caplog.text.count("the tokens in use are kept: the token file is empty") == 2
    path.unlink()
    file.reload()
    access.check(SOMEBODY, NEW, "a", Role.WORKER)
    os.mkfifo(path)
    file.reload()
    assert "no regular file" in caplog.text, "and the coordinator does not wait for who writes to it"
    access.check(SOMEBODY, NEW, "a", Role.WORKER)
    path.unlink()
    path.symlink_to("x" * 300)
    file.reload()
    assert "cannot be read: File name too long" in caplog.text, "as where nobody may look, or a server of files has gone"
    access.check(SOMEBODY, NEW, "a", Role.WORKER)
    assert OLD not in caplog.text
    assert NEW not in caplog.text
