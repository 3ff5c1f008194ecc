"""How much unexpected messages may take follows from the memory that this process may use."""

import os
from pathlib import Path

import pytest

from ferrorpc import control_groups
from ferrorpc.transports.credit import unexpected_bytes_max

NO_LIMIT_OF_VERSION_1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("own", "file", "content"),
    [
        ("0::/\n", "memory.max", "4096\n"),
        ("0::/user/job\n", "user/job/memory.max", "4096\n"),
        ("0::/user/job\n", "user/memory.max", "4096\n"),
        ("4:memory:/docker/abc\n0::/\n", "memory/docker/abc/memory.limit_in_bytes", "4096\n"),
        ("4:memory:/docker/abc\n", "memory/memory.limit_in_bytes", "4096\n"),
        ("0::/\n", "memory.max", "max\n"),
        ("4:memory:/\n", "memory/memory.limit_in_bytes", NO_LIMIT_OF_VERSION_1),
    ],
)
def test_half_of_what_the_tightest_control_group_allows(
    own: str, file: str, content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "groups" / file
    limit.parent.mkdir(parents=True)
    limit.write_text(content)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")
    machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert unexpected_bytes_max.__wrapped__() == (2048 if content == "4096\n" else machine_bytes // 2)
