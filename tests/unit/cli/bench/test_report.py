"""Comparisons as tables, and their targets."""

import pytest

from benchmarks import targets
from ferrorpc.cli.bench import report
from ferrorpc.cli.bench.case import ALL_REDUCE, BARRIER, GLOO, REGISTERED, Case, Contender, ferrorpc_system, size_text

KIB = 1 << 10


def figures(median, minimum=None):
    return {
        "median_seconds": median, "min_seconds": minimum or median, "p90_seconds": median, "cpu_seconds": median,
        "peak_bytes": 3 << 20, "others_cpus": 0.25, "blocks": 9, "repetitions": 4,
    }  # fmt: skip


def row(case, **results):
    return {"case": case.to_json(), "results": results}


def test_labels_and_titles():
    system = ferrorpc_system("shared_memory")
    assert Contender(system).label == "shared_memory"
    assert Contender(system, REGISTERED, "int8").label == "shared_memory registered int8"
    assert Case(BARRIER, 4).title == "barrier, 4 ranks"
    assert Case(ALL_REDUCE, 2, 16 << 20, "float16").title == "all_reduce 16 MiB float16, 2 ranks"
    assert [Case(ALL_REDUCE, 2, size, "bfloat16").count for size in (0, 1, 2, 64)] == [1, 1, 1, 32]
    assert [size_text(size) for size in (0, 1000, KIB, 1536, 1 << 20)] == ["0 B", "1000 B", "1 KiB", "1.5 KiB", "1 MiB"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.14e-7, "0.314 us"), (12.34e-6, "12.3 us"), (0.01234, "12.3 ms"), (2.0, "2 s")]
)
def test_times_have_three_digits_and_a_unit(seconds, text):
    assert report.time_text(seconds) == text


def test_a_ratio_is_the_peers_time_over_ours():
    found = row(Case(BARRIER), grpc=figures(2e-3, 1e-3), gloo=figures(4e-3), mpich={"skipped": "absent"})
    assert report.ratio(found, "grpc", "gloo") == 2.0
    assert report.ratio(found, "grpc", "gloo", "min_seconds") == 4.0
    assert report.ratio(found, "grpc", "mpich") is None
    assert report.ratio(found, "nobody", "gloo") is None


def test_the_table_has_losers_and_says_who_was_not_measured():
    rows = [
        row(Case(BARRIER), grpc=figures(4e-3), gloo=figures(1e-3), mpich={"skipped": "there is no mpiexec"}),
        row(Case(BARRIER, 4), grpc=figures(4e-3), gloo=figures(8e-3), mpich={"skipped": "there is no mpiexec"}),
    ]
    header, *lines = report.describe(rows, ["gloo", "mpich"]).splitlines()
    assert header.split()[-3:] == ["blocks", "x", "gloo"]  # no column for a peer without figures
    assert lines[0].split()[:4] == ["barrier,", "2", "ranks", "grpc"]
    assert [line.split()[-1] for line in lines[:4]] == ["0.25", "1.00", "2.00", "1.00"]
    assert "25%" in lines[0]
    assert "3.0 MiB" in lines[0]
    assert lines[4:] == ["not measured: mpich: there is no mpiexec [barrier, 2 ranks, and 1 more]"]


@pytest.mark.parametrize(("times", "verdict"), [(9.9, "MISSED"), (10.0, "must"), (29.0, "must"), (30.0, "aim")])
def test_a_target_is_judged_by_the_ratio_of_medians(times, verdict):
    case = Case(ALL_REDUCE, 2, KIB)
    rows = [row(case, shared_memory=figures(1.0, 0.5), gloo=figures(times, times))]
    judged = [each for each in targets.judge(rows, "shared_memory") if each["peer"] == GLOO.name]
    assert [(each["must"], each["aim"], each["verdict"]) for each in judged] == [(10, 30, verdict)]
    assert judged[0]["ratio_of_minima"] == 2 * times
    assert verdict in targets.describe(judged)


def test_what_was_not_measured_is_not_judged():
    case = Case(ALL_REDUCE, 2, KIB)
    rows = [row(case, shared_memory=figures(1.0), gloo={"skipped": "torch is not installed"})]
    assert {each["verdict"] for each in targets.judge(rows, "shared_memory")} == {"not measured"}


def test_the_first_transport_is_the_fast_one():
    rows = [row(Case(BARRIER), grpc=figures(1.0), gloo=figures(100.0))]
    assert [(each["system"], each["verdict"]) for each in targets.judge(rows, "grpc")] == [("grpc", "aim")]


def test_every_target_is_more_than_its_must():
    assert all(0 < target.must < target.aim for target in targets.TARGETS)


def test_a_picture_is_drawn_of_what_there_is(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    rows = [
        row(Case(ALL_REDUCE, 2, size), grpc=figures(size / 1e9), gloo=figures(size / 2e9), mpich={"skipped": "absent"})
        for size in (KIB, 64 * KIB)
    ]
    machine = {"cpus": 2, "processor": "any", "load_average": [0.1], "python": "3", "versions": {}}
    results = {"machine": machine, "loads": [], "transports": ["grpc"], "rows": rows}
    plot.draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="no all_reduce"):
        plot.draw({**results, "rows": [row(Case(BARRIER), grpc=figures(1.0))]}, tmp_path / "none.png")
