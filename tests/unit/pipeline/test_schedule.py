"""Schedules as values: validation, simulation, and their text forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ferrorpc import schedules
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.schedules import Schedule

SOUND = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n"


def found(text: str, **caps) -> list[tuple[str, str]]:
    return [(finding.rule, str(finding)) for finding in Schedule.from_text(text).validate(**caps)]


def test_a_sound_schedule_has_no_findings():
    assert found(SOUND) == []


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1\n", ("missing", "rank 0: 0I1 is missing, and so is a B in its place")),
        ("0F0 0B0 0B1\n1F0 1B0 1F1 1B1\n", ("missing", "rank 0: 0F1 is missing")),
        ("0F0 0F1 0B0 0B1 0B0\n1F0 1B0 1F1 1B1\n", ("duplicate", "rank 0: 0B0 is there 2 times")),
        ("0F0 0F1 0B0 0W0 0B1\n1F0 1B0 1F1 1B1\n", ("duplicate", "rank 0: 0B0 and 0W0: a backward is one B, or an I and a W")),
        ("0F0 0B0 0I0 0W0\n", ("duplicate", "rank 0: 0B0 and 0I0 and 0W0: a backward is one B, or an I and a W")),
        ("0F0 0F1 0B1 0B0\n0F1 1F0 1B0 1F1 1B1\n", ("placement", "stage 0 is on ranks [0, 1]; a stage has one rank")),
        ("0F0 0B0\n2F0 2B0\n", ("missing", "1F0 is missing")),
        ("0F0 0B0\n1B0 1F0\n", ("order", "rank 1: 1B0 comes before 1F0")),
        ("0F0 0W0 0I0\n", ("order", "rank 0: 0W0 comes before 0I0")),
        ("", ("empty", "no rank has anything to do")),
        ("0F0 0B0\n\n1F0 1B0", ("empty", "nothing to do for ranks [1]")),
    ],
)
def test_each_rule_is_found(text: str, finding: tuple[str, str]):
    assert finding in found(text)


@pytest.mark.parametrize("text", ["0F0 0B0 0F999999999\n", "0F0 0B0\n999999999B0\n", "0F0 0F99999 99999F0\n"])
def test_a_number_far_beyond_the_others_is_one_finding_at_once(text: str):
    ((rule, message),) = found(text)
    assert rule == "missing"
    assert "3 actions are far too few for" in message


def test_a_deadlock_is_found_with_where_every_rank_stands():
    """Rank 0 waits for the gradient of microbatch 0 before it sends 1; rank 1 waits for 1 before it sends a gradient."""
    assert found("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1\n") == [
        ("deadlock", "rank 0: never starts 0B0, which needs 1B0"),
        ("deadlock", "rank 1: never starts 1F1, which needs 0F1"),
    ]


def test_with_too_few_credits_a_send_blocks_for_ever():
    """Rank 0 sends all four microbatches before it receives any; with fewer credits it blocks."""
    schedule = schedules.looped_bfs(stages=2, microbatches=4, chunks=2)
    assert schedule.validate(credits=4) == []
    assert [str(each) for each in schedule.validate(credits=1)] == [
        "rank 0: never starts 0SEND_F3, which needs 1F2",
        "rank 1: never starts 1SEND_F1, which needs 2F0",
    ]


def test_1f1b_needs_no_more_credits_than_its_warm_up():
    assert schedules.one_f_one_b(4, 8).validate(credits=np.int64(2)) == []


def test_a_peak_above_the_cap_is_found_on_its_ranks():
    findings = schedules.one_f_one_b(stages=4, microbatches=8).validate(peak=3)
    assert [(finding.rule, finding.rank) for finding in findings] == [("peak", 0)]
    assert schedules.gpipe(stages=4, microbatches=3).validate(peak=3) == []


def test_messages_that_are_spelled_out_are_checked():
    spelled = schedules.one_f_one_b(2, 2).with_messages()
    text = spelled.to_text()
    assert text.splitlines()[0] == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert spelled.validate() == []
    assert spelled.with_messages().actions == spelled.actions
    assert found(text.replace(" 0SEND_F1", "")) == [("message", "rank 0: 0SEND_F1 is missing")]
    assert found(text.replace("0F0 0SEND_F0", "0SEND_F0 0F0")) == [("message", "rank 0: 0SEND_F0 comes before 0F0")]
    assert found(text.replace("0RECV_B0 0B0", "0B0 0RECV_B0")) == [("message", "rank 0: 0RECV_B0 comes after 0B0")]
    assert found(text.replace("1F0", "1F0 1SEND_F0", 1)) == [
        ("message", "rank 1: 1SEND_F0: nothing has to be sent there"),
    ]


def test_a_send_that_is_put_off_puts_off_who_waits_for_it():
    text = "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1\n"
    spans = {span.name: span.start for span in Schedule.from_text(text).simulate().spans}
    assert spans["1F0"] == 2.0


def test_latency_and_transfer_delay_what_crosses_ranks():
    schedule = schedules.gpipe(stages=2, microbatches=2)
    spans = {span.name: span.start for span in schedule.simulate(latency=0.5, transfer=2.0).spans}
    assert spans["1F0"] == 1 + 2 + 0.5
    assert spans["1F1"] == 1 + 2 + 2 + 0.5, "the second message waits for the first to leave the link"


def test_costs_are_of_ranks_or_of_pieces():
    schedule = schedules.zbv(stages=2, microbatches=3)
    by_rank = schedule.simulate(forward=[2.0, 4.0])
    lengths = {span.name: span.stop - span.start for span in by_rank.spans}
    assert (lengths["0F0"], lengths["1F0"], lengths["2F0"], lengths["3F0"]) == (1, 2, 2, 1)
    by_piece = schedule.simulate(forward=[1.0, 2.0, 3.0, 4.0])
    assert {span.name: span.stop - span.start for span in by_piece.spans}["3F0"] == 4.0
    one = schedule.simulate().makespan
    assert schedule.simulate(np.float32(1), np.array(1), np.ones(2)).makespan == one
    wrongs = [{"forward": None}, {"backward_input": "two"}, {"backward_weight": [1, "two"]}, {"latency": None}]
    for wrong in [*wrongs, {"forward": float("inf")}, {"backward_input": [1, -1]}, {"latency": -1}, {"transfer": float("nan")}]:
        with pytest.raises(UsageError, match=r"is no time, so it cannot be a (cost|latency|transfer)(.|\n)*0 or more"):
            schedule.simulate(**wrong)
    with pytest.raises(UsageError, match=r"a list of 3 costs(.|\n)*a list of 2 or 4"):
        schedule.simulate(forward=[1.0, 2.0, 3.0])


def test_a_whole_backward_costs_both_its_parts():
    spans = schedules.gpipe(1, 1).simulate(forward=1.0, backward_input=2.0, backward_weight=4.0).spans
    assert [(span.name, span.start, span.stop) for span in spans] == [("0F0", 0, 1), ("0B0", 1, 7)]


def test_what_is_not_sound_is_not_simulated():
    with pytest.raises(UsageError, match=r"custom: 1 stages, 1 microbatches is not sound: rank 0: 0I0 is missing"):
        Schedule.from_text("0F0").simulate()


@pytest.mark.parametrize("name", schedules.NAMED)
def test_text_and_csv_are_read_back_as_they_were(name: str, tmp_path: Path):
    schedule = schedules.named(name, stages=3, microbatches=7)
    assert Schedule.from_text(schedule.to_text()).actions == schedule.actions
    assert Schedule.from_csv(schedule.to_csv()).actions == schedule.actions
    schedule.to_csv(tmp_path / "s.csv")
    assert Schedule.from_csv(tmp_path / "s.csv", name).actions == schedule.actions
    spelled = schedule.with_messages()
    assert Schedule.from_csv(spelled.to_csv()).actions == spelled.actions
    assert spelled.simulate().makespan == schedule.simulate().makespan


def test_columns_of_the_csv_are_moments():
    assert schedules.gpipe(2, 2).to_csv().splitlines() == ["0F0,0F1,,,0B0,0B1", ",1F0,1F1,1B0,1B1"]


def test_a_table_with_overlapped_pairs_is_read():
    rows = schedules.dualpipe_v(1, 2).to_text().split()
    assert Schedule.from_csv("0F0,1F0,(0F1;1B0)OVERLAP_F_B,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n").to_text().split() == rows


def test_a_csv_of_a_spreadsheet_is_read_whose_text_begins_with_a_mark_and_ends_with_empty_lines(tmp_path: Path):
    schedule = schedules.gpipe(2, 2)
    text = f"\ufeff{schedule.to_csv()}\r\n,,,,,\r\n"
    (tmp_path / "s.csv").write_text(text, encoding="utf-8", newline="")
    assert Schedule.from_csv(text).actions == Schedule.from_csv(tmp_path / "s.csv").actions == schedule.actions


def test_a_cell_that_is_no_action_is_refused():
    with pytest.raises(UsageError, match="'0UNSHARD' is no action"):
        Schedule.from_csv("0UNSHARD,0F0,0B0\n")


def test_a_file_that_is_no_schedule_is_named(tmp_path: Path):
    for content, problem in ((b"0F0,0UNSHARD\n", "'0UNSHARD' is no action"), (b"\xff\n", "UTF-8")):
        (tmp_path / "mine.csv").write_bytes(content)
        with pytest.raises(UsageError, match=rf"mine\.csv.*{problem}"):
            Schedule.from_csv(tmp_path / "mine.csv")


def test_credits_and_peaks_that_are_no_numbers_are_refused():
    with pytest.raises(UsageError, match="credits=-1"):
        schedules.gpipe(2, 2).validate(credits=-1)
    with pytest.raises(UsageError, match="peak=nan"):
        schedules.gpipe(2, 2).validate(peak=float("nan"))


def test_forward_first_and_split_are_told():
    assert schedules.gpipe(3, 4).is_forward_first
    assert schedules.looped_bfs(3, 4).is_forward_first
    assert not schedules.one_f_one_b(3, 4).is_forward_first
    assert schedules.zbv(3, 4).is_split
    assert not schedules.gpipe(3, 4).is_split


def test_a_notebook_shows_a_sound_schedule_and_words_tell_of_any():
    sound = schedules.one_f_one_b(stages=2, microbatches=3)
    assert sound._repr_svg_() == sound.simulate()._repr_svg_()
    assert repr(sound) == "<Schedule one_f_one_b: 2 stages, 3 microbatches>"
    assert Schedule.of("backwards", [row[::-1] for row in sound.actions])._repr_svg_() is None
    assert repr(schedules.zbv(stages=2, microbatches=4)) == "<Schedule zbv: 2 stages, 2 chunks each, 4 microbatches>"


def test_pictures_and_traces_are_written(tmp_path: Path):
    schedule = schedules.zbv(stages=4, microbatches=8)
    schedule.to_svg(tmp_path / "s.svg")
    text = (tmp_path / "s.svg").read_text()
    assert "zbv: 4 stages, 2 chunks each, 8 microbatches" in text
    assert "backward weight, chunk 1" in text
    schedule.to_chrome_trace(tmp_path / "s.json")
    assert '"7I3"' in (tmp_path / "s.json").read_text()


@pytest.mark.parametrize("name", schedules.NAMED)
def test_costs_of_a_timeline_simulate_it_again(name: str):
    schedule = schedules.named(name, stages=3, microbatches=7)
    pieces = range(schedule.virtual_stages)
    costs = {"forward": [1.0 + piece for piece in pieces], "backward_input": [2.0 + piece for piece in pieces]}
    timeline = schedule.simulate(**costs, backward_weight=costs["backward_input"])
    again = schedule.simulate(**timeline.costs(schedule))
    assert [(s.name, s.start, s.stop) for s in again.spans] == [(s.name, s.start, s.stop) for s in timeline.spans]
