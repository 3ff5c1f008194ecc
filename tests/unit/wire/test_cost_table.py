"""The cost table: what it accepts, what it gives between measured numbers of ranks."""

from __future__ import annotations

import json
import sys

import pytest

from ferrorpc.wire.cost_table import TABLE_BYTES_MAX, VERSION, Costs, CostTable, parse

TOO_DEEP = "maximum recursion depth" if sys.version_info < (3, 14) else "Expecting value"  # 3.14 follows it to its end
ROW = {
    "ranks": 4,
    "alpha_seconds": 1e-4,
    "message_seconds": 0,
    "beta_seconds_per_byte": 1e-9,
    "gamma_seconds_per_byte": 2e-10,
}


def text(*rows: object, name: object = "mine", **more: object) -> str:
    return json.dumps({"version": VERSION, "name": name, "lanes": {"grpc": list(rows)}, **more})


def test_a_table_comes_back_as_it_was_written():
    table = CostTable("mine", {2: Costs(1e-4, 1e-5, 1e-9, 0.0), 8: Costs(2e-4, 0.0, 3e-9, 1e-10)})
    assert parse(table.text()) == table


def test_the_nearest_number_of_ranks_by_ratio_holds():
    table = parse(text({**ROW, "ranks": 2, "alpha_seconds": 2}, {**ROW, "ranks": 16, "alpha_seconds": 16}))
    chosen = {ranks: table.costs(ranks).alpha_seconds for ranks in (1, 2, 5, 6, 16, 1000)}
    assert chosen == {1: 2, 2: 2, 5: 2, 6: 16, 16: 16, 1000: 16}


def test_processors_are_those_that_all_ranks_share_however_many_they_are():
    table = parse(text({**ROW, "ranks": 4}, processors=2))
    assert parse(table.text()) == table
    for ranks in (1, 4, 8):
        assert table.costs(ranks) == Costs(1e-4, 0.0, 1e-9, 2e-10, processors=2)
    assert "2 processors for all" in str(table.costs(4))


def test_a_table_of_the_first_version_is_read_unless_its_processors_stand_for_another_model():
    first = json.loads(text(ROW))
    del first["version"]
    table = parse(json.dumps(first))
    assert table == parse(text(ROW))
    assert json.loads(table.text())["version"] == VERSION
    with pytest.raises(ValueError, match=r"processors of version 1.*--fit"):
        parse(json.dumps({**first, "processors": 2}))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("{", "not JSON"),
        ("[" * 9999, f"not JSON: {TOO_DEEP}"),
        ("[]", "name and lanes"),
        (text(ROW, extra=1), "name and lanes"),
        (text(ROW, name=1), "name is no text"),
        (text(ROW, version=VERSION + 1), f"version is {VERSION + 1}, this is read up to {VERSION}"),
        (text(ROW, version="2"), "version is '2'"),
        (text(ROW, version=0), "version is 0"),
        (text(ROW, processors=0), "processors is 0"),
        (text(ROW, processors=True), "processors is True"),
        (json.dumps({"name": "x", "lanes": {"carrier pigeon": [ROW]}}), "exactly: grpc"),
        (json.dumps({"name": "x", "lanes": {}}), "exactly: grpc"),
        (text(), "one row or more"),
        (text({**ROW, "ranks": 0}), "not a number of ranks"),
        (text({**ROW, "ranks": True}), "not a number of ranks"),
        (text(ROW, ROW), "4 ranks have a row already"),
        (text({**ROW, "alpha_seconds": -1}), "alpha_seconds is -1"),
        (text({**ROW, "beta_seconds_per_byte": "1"}), "beta_seconds_per_byte is '1'"),
        (text({**ROW, "gamma_seconds_per_byte": float("nan")}), "gamma_seconds_per_byte is nan"),
        (text({key: value for key, value in ROW.items() if key != "message_seconds"}), "must have ranks"),
        (text(ROW, name="x" * TABLE_BYTES_MAX), "at most"),
    ],
)
def test_what_is_no_table_is_refused_with_the_place(wrong, words):
    with pytest.raises(ValueError, match=words):
        parse(wrong)
