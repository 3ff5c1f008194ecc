"""A coordinator publishes its cost table: every rank of a generation chooses by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ferrorpc_coordinator.__main__ import options_from

from ferrorpc.config import Config
from ferrorpc.errors import ConfigError
from ferrorpc.wire.cost_table import Costs, CostTable, parse
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join_all

TABLE = CostTable("a test's", {2: Costs(1.0, 0.0, 1e-12, 0.0)})


def test_every_rank_gets_the_table_of_its_generation(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(TABLE.text())
    service = CoordinatorProcess("--cost-table", str(path))
    try:
        sessions = join_all(service.address, 2)
        assert [parse(session.membership.assignment.cost_table) for session in sessions] == [TABLE, TABLE]
        for session in sessions:
            session.leave()
    finally:
        service.stop()


def test_without_a_table_none_travels() -> None:
    assert options_from(Config({}, {})).settings.cost_table == ""


@pytest.mark.parametrize("content", [None, "{}", "\xff"])
def test_a_table_that_cannot_be_used_stops_the_coordinator(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "costs.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"costs\.json cannot be used"):
        options_from(Config({"cost_table": str(path)}, {}))
