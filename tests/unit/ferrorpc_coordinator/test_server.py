"""What is said of a coordinator that does not come up."""

from __future__ import annotations

from pathlib import Path

import pytest
from ferrorpc_coordinator import server
from ferrorpc_coordinator.state.access import Access
from ferrorpc_coordinator.state.settings import Settings

from ferrorpc.errors import ConfigError

OPTIONS = server.Options("127.0.0.1:0", Settings(), data_dir=Path("data"))


def test_a_journal_that_makes_no_sense_is_blamed():
    with pytest.raises(ConfigError, match="the journal in data cannot be read"):
        server._recovered(OPTIONS, [("member", "job/a", b"")], Access(()))


def test_an_empty_journal_is_not_blamed_for_what_fails_without_it(monkeypatch):
    def mint():
        raise OSError("no entropy")

    monkeypatch.setattr(server, "_mint", mint)
    with pytest.raises(OSError, match="no entropy"):
        server._recovered(OPTIONS, [], Access(()))
