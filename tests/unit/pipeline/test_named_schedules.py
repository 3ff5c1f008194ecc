"""The named schedules: sound for all counts that they admit, with the bubbles and peaks of the literature."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.schedules import Schedule

STAGES = range(1, 9)
MICROBATCHES = (*range(1, 18), 24, 31, 32)
CHUNKED = ("looped_bfs", "interleaved", "zb1p")
WHOLE = ("gpipe", "1f1b", "zbv", "dualpipe_v")


def least(name: str, stages: int) -> int:
    """The fewest microbatches that a schedule admits."""
    return 2 * stages if name == "dualpipe_v" else 1


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(("name", "chunks"), [*((n, None) for n in WHOLE), *((n, v) for n in CHUNKED for v in (1, 2, 3, 4))])
def test_every_schedule_is_sound_for_all_stages_microbatches_and_chunks(name: str, chunks: int | None, stages: int):
    for microbatches in (count for count in MICROBATCHES if count >= least(name, stages)):
        schedule = schedules.named(name, stages, microbatches, chunks)
        assert schedule.validate() == []
        assert (schedule.stages, schedule.microbatches) == (stages, microbatches)
        assert schedule.chunks == (chunks or {"zbv": 2, "dualpipe_v": 2}.get(name, 1))


def bubble(schedule: Schedule) -> float:
    return schedule.simulate().bubble_fraction


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 7, 8, 32])
class TestClosedForms:
    """At equal costs of forward, input and weights; p stages, m microbatches."""

    def test_gpipe_and_1f1b_idle_p_minus_1_of_m_plus_p_minus_1(self, stages: int, microbatches: int):
        expected = (stages - 1) / (microbatches + stages - 1)
        assert bubble(schedules.gpipe(stages, microbatches)) == pytest.approx(expected)
        assert bubble(schedules.one_f_one_b(stages, microbatches)) == pytest.approx(expected)

    def test_gpipe_holds_all_microbatches_and_1f1b_at_most_one_for_each_stage_ahead(self, stages: int, microbatches: int):
        assert schedules.gpipe(stages, microbatches).simulate().peak_activations == [microbatches] * stages
        peaks = schedules.one_f_one_b(stages, microbatches).simulate().peak_activations
        assert peaks == [min(stages - rank, microbatches) for rank in range(stages)]

    def test_zb1p_idles_a_third_of_that_and_holds_no_more(self, stages: int, microbatches: int):
        timeline = schedules.zb1p(stages, microbatches).simulate()
        if microbatches >= stages:
            assert timeline.bubble_fraction == pytest.approx((stages - 1) / (3 * microbatches + stages - 1))
        assert timeline.peak_activations == [min(stages, microbatches)] * stages

    def test_zbv_idles_only_at_the_ramps(self, stages: int, microbatches: int):
        timeline = schedules.zbv(stages, microbatches).simulate()
        if microbatches >= 2 * stages - 1:
            assert timeline.bubble_fraction == pytest.approx((stages - 1) / (6 * microbatches + stages - 1))
        assert max(timeline.peak_activations) == min(stages, microbatches)

    def test_looped_bfs_divides_the_bubble_by_its_chunks(self, stages: int, microbatches: int):
        if microbatches >= stages:
            expected = (stages - 1) / (3 * microbatches + stages - 1)
            assert bubble(schedules.looped_bfs(stages, microbatches, chunks=3)) == pytest.approx(expected)

    def test_interleaved_divides_it_too_and_holds_a_little_more_than_1f1b(self, stages: int, microbatches: int):
        timeline = schedules.interleaved(stages, microbatches, chunks=2).simulate()
        if microbatches % stages == 0:
            assert timeline.bubble_fraction == pytest.approx((stages - 1) / (2 * microbatches + stages - 1))
            assert timeline.peak_activations[0] == min(stages + (stages - 1) / 2, microbatches)

    def test_interleaved_with_one_chunk_is_1f1b(self, stages: int, microbatches: int):
        one = schedules.interleaved(stages, microbatches, chunks=1)
        assert one.actions == schedules.one_f_one_b(stages, microbatches).actions


# Bubble in percent and peak activations, as an independent simulator found them for the published orders.
TABLE = {
    "gpipe": (["42.9/4", "27.3/8", "15.8/16", "30.4/16", "17.9/32"], 29.8),
    "1f1b": (["42.9/4", "27.3/4", "15.8/4", "30.4/8", "17.9/8"], 33.7),
    "looped_bfs": (["27.3/4", "15.8/8", "8.6/16", "17.9/16", "9.9/32"], 19.2),
    "interleaved": (["27.3/4", "15.8/5.5", "8.6/5.5", "17.9/11.5", "9.9/11.5"], 23.3),
    "interleaved 4": (["15.8/4", "8.6/4.75", "4.5/4.75", "9.9/9.75", "5.2/9.75"], 25.6),
    "zb1p": (["20.0/4", "11.1/4", "5.9/4", "12.7/8", "6.8/8"], 18.4),
    "zb1p 2": (["11.1/4", "5.9/4", "3.0/4", "6.8/8", "3.5/8"], 16.4),
    "zbv": (["20.0/4", "5.9/4", "3.0/4", "6.8/8", "3.5/8"], 14.6),
    "dualpipe_v": (["", "5.9/4.5", "3.0/4.5", "6.8/8.5", "3.5/8.5"], 16.1),
}
COUNTS = ((4, 4), (4, 8), (4, 16), (8, 16), (8, 32))


@pytest.mark.parametrize("name", TABLE)
def test_bubbles_and_peaks_are_those_of_the_published_orders(name: str):
    key, _, chunks = name.partition(" ")
    cells, with_latency = TABLE[name]
    for (stages, microbatches), cell in zip(COUNTS, cells, strict=True):
        if cell:
            timeline = schedules.named(key, stages, microbatches, int(chunks) if chunks else None).simulate()
            assert f"{100 * timeline.bubble_fraction:.1f}/{max(timeline.peak_activations):g}" == cell
    timeline = schedules.named(key, 4, 8, int(chunks) if chunks else None).simulate(latency=0.2)
    assert 100 * timeline.bubble_fraction == pytest.approx(with_latency, abs=0.05)


def test_the_order_of_1f1b_rank_by_rank():
    assert schedules.one_f_one_b(stages=3, microbatches=4).to_text().splitlines() == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_the_order_of_zb1p_rank_by_rank():
    assert schedules.zb1p(stages=2, microbatches=3).to_text().splitlines() == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_zbv_turns_round_on_the_last_rank():
    schedule = schedules.zbv(stages=3, microbatches=5)
    assert [schedule.pieces(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_looped_schedules_go_round_the_ranks():
    assert schedules.interleaved(3, 6, chunks=2).placement == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("make", [schedules.gpipe, schedules.one_f_one_b, schedules.zb1p, schedules.zbv])
@pytest.mark.parametrize(("stages", "microbatches"), [(0, 4), (4, 0), (-1, 4), (2.0, 4), (True, 4)])
def test_counts_below_one_are_refused_with_their_name(make: Callable[..., Schedule], stages, microbatches):
    with pytest.raises(UsageError, match="is an integer of at least 1"):
        make(stages=stages, microbatches=microbatches)


@pytest.mark.parametrize("name", schedules.NAMED)
def test_counts_may_be_integers_of_numpy(name: str):
    """Of eight bits, which products of counts would overflow."""
    assert schedules.named(name, np.uint8(16), np.int8(100)) == schedules.named(name, 16, 100)


def test_dualpipe_v_names_its_rule():
    with pytest.raises(UsageError, match=r"needs at least 2 \* stages microbatches.*\n?try: use 8 microbatches"):
        schedules.dualpipe_v(stages=4, microbatches=7)


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(UsageError, match="gpipe, 1f1b, looped_bfs, interleaved, zb1p, zbv, dualpipe_v"):
        schedules.named("zero_bubble", 4, 8)


def test_chunks_are_refused_where_the_schedule_fixes_them():
    with pytest.raises(UsageError, match="every rank holds 2"):
        schedules.named("zbv", 4, 8, chunks=3)
    assert schedules.named("zbv", 4, 8, chunks=2).actions == schedules.zbv(4, 8).actions
    assert schedules.named("DualPipeV", 4, 8, chunks=2).actions == schedules.dualpipe_v(4, 8).actions
