"""How `ferrorpc status` shows the coordinator's response."""

import contextlib
import json
import os
import re
import sys
from types import SimpleNamespace

import pytest

from ferrorpc.cli import status
from ferrorpc.cli.status import as_json_text
from ferrorpc.cli.status_text import SLOW_FACTOR, PreviousStatus, as_text
from ferrorpc.cli.table import table
from ferrorpc.config import Config
from ferrorpc.errors import ConfigError, CoordinatorUnavailableError
from ferrorpc.v1 import identity_pb2, session_pb2
from tests.house.tree import ROOT


def answer():
    return session_pb2.StatusResponse(
        position=identity_pb2.Position(cluster_id="c1", epoch=2, generation=5, revision=9),
        job="night",
        members=[
            identity_pb2.Member(name="spare", rank=-1, state=identity_pb2.MEMBER_STATE_WAITING, host="b", beat_age_ms=100),
            identity_pb2.Member(
                name="a-1", rank=1, state=identity_pb2.MEMBER_STATE_STALLED, host="a", step=12, beat_age_ms=4200,
                reason="no beat for 4.2 s", activity="all_reduce #12",
            ),
            identity_pb2.Member(name="a-0", rank=0, state=identity_pb2.MEMBER_STATE_ACTIVE, host="a", step=13, beat_age_ms=40),
        ],
        barriers=[
            session_pb2.BarrierStatus(name="epoch", generation=5, ordinal=3, arrived_ranks=[0], missing_ranks=[1], age_ms=1500)
        ],
        generations=[
            session_pb2.GenerationStatus(generation=4, size=3, reason="3 of 3 joined", end_reason="rank 2 was lost"),
            session_pb2.GenerationStatus(generation=5, size=2, reason="replaces generation 4: rank 2 was lost"),
        ],
        store_keys=2,
        store_bytes=30,
        durable=True,
        version="0.1.0",
        waiting_reason="1 of 2 joined",
    )  # fmt: skip


def test_the_page_shows_members_in_rank_order_with_what_is_known_of_each():
    lines = as_text(answer()).splitlines()
    header = next(index for index, line in enumerate(lines) if line.startswith("rank"))
    rows = [line.split() for line in lines[header + 1 : header + 4]]
    assert [row[0] for row in rows] == ["0", "1", "-"]
    assert rows[1][:6] == ["1", "a-1", "stalled", "a", "12", "4.2"]
    assert "all_reduce #12" in lines[header + 2]
    assert lines[header + 2].endswith("no beat for 4.2 s")


def test_a_state_that_only_a_newer_coordinator_knows_is_unknown():
    response = answer()
    response.members[0].state = 99
    assert "spare  unknown  b" in as_text(response)
    assert "of all: 1 stalled, 1 active, 1 unknown" in as_text(response, rows_max=1)


def test_the_page_names_who_is_missing_at_a_barrier_and_why_generations_began_and_ended():
    text = as_text(answer())
    assert "epoch #3 of generation 5: 1 arrived, missing ranks 1, open for 1.5 s" in text
    assert "4: 3 members, 3 of 3 joined; ended: rank 2 was lost" in text
    assert "5: 2 members, replaces generation 4: rank 2 was lost" in text
    assert "journal on disk" in text


def test_what_the_coordinator_says_of_itself_is_shown_with_escapes():
    clear = "\x1b[2J"
    position = identity_pb2.Position(cluster_id=clear)
    assert "\x1b" not in as_text(session_pb2.StatusResponse(job=clear, version=clear, position=position))


def test_the_headline_is_the_coordinators():
    told = answer()
    told.headline.MergeFrom(session_pb2.Headline(level="warn", title="Rank 1 is \x1b[2J", details=["silent", "Next round: x"]))
    assert "\n\nRank 1 is \\x1b[2J\nsilent; Next round: x\n\n" in as_text(told)
    told.headline.ClearField("details")
    assert "\n\nRank 1 is \\x1b[2J\n\nstore: " in as_text(told)


def healthy(*steps, state="MEMBER_STATE_ACTIVE", **more):
    return session_pb2.StatusResponse(
        members=[
            identity_pb2.Member(
                name=f"w{rank}", rank=rank, state=identity_pb2.MemberState.Value(state), step=step, host="h",
                step_age_ms=13_000, activity="all_reduce #20",
            )
            for rank, step in enumerate(steps)
        ],
        generations=[session_pb2.GenerationStatus(generation=1, size=len(steps))],
        **more,
    )  # fmt: skip


def test_of_a_job_that_is_over_no_rate_is_shown():
    before, after = healthy(5, 5), healthy(9, 9, state="MEMBER_STATE_LEFT")
    for response, sent in ((before, 1000), (after, 5000)):
        response.members[0].links.add(peer_rank=1, kind="grpc", sent_bytes=sent)
    text = as_text(after, PreviousStatus(before, 2.0))
    assert "ops/s" not in text
    assert "bytes a second" not in text
    assert "  rank 0 to 1 by grpc: 5 kB" in text


def test_what_is_left_out_is_counted():
    response = answer()
    for number in range(20):
        response.occurrences.add(kind="back", text=f"number {number}", age_ms=1000 * (20 - number))
    lines = as_text(response).splitlines()
    first = lines.index("events, the newest first") + 1
    assert lines[first].endswith("number 19")
    assert lines[first + 8] == "  ... and 12 more"
    generations = lines.index("generations, the newest first")
    assert lines[generations + 1].startswith("  5: 2 members")


def test_an_empty_job_says_so():
    assert "no members" in as_text(session_pb2.StatusResponse(job="x"))


def test_json_keeps_the_protocols_names_and_its_zeros():
    found = json.loads(as_json_text(answer()))
    assert found["members"][2]["rank"] == 0
    assert found["members"][1]["state"] == "MEMBER_STATE_STALLED"
    assert found["barriers"][0]["missing_ranks"] == [1]


def test_json_has_numbers_as_numbers_of_64_bits_too():
    response = answer()
    response.barriers[0].arrived_after_ms.append(70)
    response.generations[0].lasted_ms = 2**40
    found = json.loads(as_json_text(response))
    assert found["members"][1]["beat_age_ms"] == 4200
    assert found["position"]["generation"] == 5
    assert found["barriers"][0]["arrived_after_ms"] == [70]
    assert found["generations"][0]["lasted_ms"] == 2**40


def test_json_has_a_position_also_before_any_job_has_begun(monkeypatch, capsys):
    def ask(*_):
        raise ConfigError("there is no job", jobs=0)

    monkeypatch.setattr(status, "connect", lambda config: contextlib.nullcontext())
    monkeypatch.setattr(status, "_ask", ask)
    status.command.main(["--json", "--coordinator", "localhost:1"], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["position"]["generation"] == 0


def test_columns_are_as_wide_as_their_widest_cell():
    assert table(("a", "long"), [("xxx", "1")], right=frozenset({"long"})) == "a    long\nxxx     1"


def later():
    """A second answer: rank 0 went on, rank 1 did not."""
    response = answer()
    response.members[2].MergeFrom(
        identity_pb2.Member(
            step=33, operation_ms=1500, links=[identity_pb2.Link(peer_rank=1, kind="grpc", sent_bytes=9_000_000)]
        )
    )
    response.members[1].behind_ms = 4000
    return response


def test_rates_come_from_two_answers():
    text = as_text(later(), PreviousStatus(answer(), 2.0))
    zero = next(line for line in text.splitlines() if " a-0 " in line)
    one = next(line for line in text.splitlines() if " a-1 " in line)
    assert zero.split()[:7] == ["0", "a-0", "active", "a", "33", "10.0", "75"]
    assert one.split()[5:9] == ["0.0", "0", "%", "4.0"], "its step has not moved for 4 s while that of rank 0 did"
    assert "ops/s" not in as_text(later())


def test_the_pages_of_a_status_are_put_together(monkeypatch):
    pages = [
        session_pb2.StatusResponse(job="x", more=True, barriers=[session_pb2.BarrierStatus()], members=[identity_pb2.Member()]),
        session_pb2.StatusResponse(job="x", members=[identity_pb2.Member(rank=1)]),
    ]
    asked = []

    def call(method, request, config):
        asked.append(request.after)
        return pages.pop(0)

    monkeypatch.setattr(status, "call", call)
    found = status._ask(SimpleNamespace(Status=None), Config({"job": "x"}))
    assert asked == [0, 2]
    assert (found.more, len(found.barriers), [member.rank for member in found.members]) == (False, 1, [0, 1])


def test_watching_waits_for_a_job_and_for_a_coordinator_that_answered_before(monkeypatch, capfd):
    gone = CoordinatorUnavailableError("nobody answers")
    no_job = "there is no job 'x' here"
    known = [ConfigError(no_job, hint=f"the jobs of this coordinator: {names}") for names in ("a", "a", "a, b")]
    answers = [*known, session_pb2.StatusResponse(job="x"), gone, gone, KeyboardInterrupt()]

    def ask(*_):
        found = answers.pop(0)
        if isinstance(found, BaseException):
            raise found
        return found

    dials = []

    @contextlib.contextmanager
    def connect(*_):
        dials.append(1)
        yield

    monkeypatch.setattr(status, "_ask", ask)
    monkeypatch.setattr(status, "connect", connect)
    monkeypatch.setattr(status, "_WATCH_SECONDS", 0)
    with pytest.raises(KeyboardInterrupt):
        status._watch(Config({}), as_json=False)
    out, err = capfd.readouterr()
    assert out.startswith("job x")
    tries = [line for line in err.splitlines() if line.startswith("try: ")]
    assert tries[:2] == ["try: the jobs of this coordinator: a", "try: the jobs of this coordinator: a, b"]
    said = [line.partition(" ")[2] for line in err.splitlines() if line not in tries]
    assert said == [no_job, no_job, "nobody answers"]
    assert len(dials) == 3, "anew each time it was gone: certificates may have been renewed"
    answers[:] = [gone]
    with pytest.raises(CoordinatorUnavailableError):
        status._watch(Config({}), as_json=False)
    answers[:] = [known[0], gone, known[0], KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        status._watch(Config({}), as_json=False)


def test_watching_with_a_token_that_cannot_be_read_ends_at_once(monkeypatch, capfd, tmp_path):
    def sleep(seconds):
        raise AssertionError("it is waited for")

    monkeypatch.setenv("FERRORPC_TOKEN_FILE", str(tmp_path / "missing"))
    monkeypatch.setattr("time.sleep", sleep)
    with pytest.raises(ConfigError, match="missing"):
        status._watch(Config({"coordinator": "127.0.0.1:1"}), as_json=False)


def watch(monkeypatch, answers, seconds=0.0):
    """Watches a job that gives these answers, so many seconds apart, until it is interrupted after the last."""
    left = list(answers)

    def ask(*_):
        if not left:
            raise KeyboardInterrupt
        return left.pop(0)

    monkeypatch.setattr(status, "_ask", ask)
    monkeypatch.setattr(status, "connect", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(status, "_WATCH_SECONDS", seconds)
    with pytest.raises(KeyboardInterrupt):
        status._watch(Config({}), as_json=False)


@pytest.mark.parametrize("another", [{"generation": 2}, {"epoch": 2}, {"cluster_id": "c2"}])
def test_rates_are_not_taken_across_generations(monkeypatch, capsys, another):
    first, second = working(5, 15)[1].response, working(5, 15)[0]
    for response in (first, second):
        response.position.MergeFrom(identity_pb2.Position(cluster_id="c1", epoch=1, generation=1))
    second.position.MergeFrom(identity_pb2.Position(**another))
    watch(monkeypatch, [first, second], seconds=0.3)
    out = capsys.readouterr().out
    assert "All ranks work" in out
    assert "ops/s" not in out


def test_on_a_terminal_what_does_not_fit_is_cut_from_the_bottom_and_at_the_width(monkeypatch, capsys):
    response = answer()
    response.headline.title = "Rank 1 is stalled"
    for number in range(30):
        response.occurrences.add(kind="back", text=f"number {number}: {'long ' * 20}", age_ms=1000)
    monkeypatch.setattr(status.shutil, "get_terminal_size", lambda: os.terminal_size((80, 24)))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    watch(monkeypatch, [response])
    lines = re.sub(r"\x1b\[[HJK]", "", capsys.readouterr().out).splitlines()
    assert lines[0].startswith("job night")
    assert "Rank 1 is stalled" in lines
    assert len(lines) == 23
    assert max(map(len, lines)) == 80


def test_a_small_worlds_links_are_a_matrix_of_rates():
    earlier = answer()
    told = as_text(later(), PreviousStatus(earlier, 2.0))
    assert "  rank 0 to 1 by grpc: 9 MB\n" in f"{told}\n", "at no rate: nobody knows when it was sent"
    (sender,) = (member for member in earlier.members if member.rank == 0)
    sender.links.add(peer_rank=1, kind="grpc", sent_bytes=1_000_000)
    lines = as_text(later(), PreviousStatus(earlier, 2.0)).splitlines()
    first = lines.index("  bytes a second by grpc")
    assert [line.split() for line in lines[first + 1 : first + 4]] == [
        ["to", "0", "1"],
        ["from", "0", "4", "MB"],
        ["from", "1"],
    ]
    assert "  rank 0 to 1 by grpc: 9 MB" in as_text(later()), "what was sent in all, where there is no earlier answer"


def test_where_not_everybody_fits_whoever_is_in_trouble_comes_first():
    text = as_text(answer(), rows_max=1)
    header = next(index for index, line in enumerate(text.splitlines()) if line.startswith("rank"))
    assert " a-1 " in text.splitlines()[header + 1]
    assert "... and 2 more; of all: 1 stalled, 1 waiting, 1 active" in text


def test_processes_of_earlier_runs_are_counted_and_hide_nobody():
    """Where every run has names of its own, as with containers, a job knows a thousand of them."""
    response = answer()
    for number in range(300):
        state = identity_pb2.MEMBER_STATE_DEAD if number < 9 else identity_pb2.MEMBER_STATE_LEFT
        response.members.add(name=f"old-{number}", rank=-1, state=state, host="a")
    for rows_max in (None, 3):
        text = as_text(response, rows_max=rows_max)
        assert all(f" {name} " in text for name in ("a-0", "a-1", "spare"))
        assert " old-" not in text
        assert "\nearlier processes: 9 dead, 291 left\n" in text
    del response.members[:3]
    assert "no members\nearlier processes: 9 dead, 291 left\n" in as_text(response)


def test_events_stragglers_and_times_are_told():
    response = answer()
    response.occurrences.add(kind="stalled", text="rank 1 (a-1 on a): silent", age_ms=4200)
    response.stragglers.add(rank=1, barriers=3, waited_ms=1250)
    response.generations[1].age_ms = 61_000
    text = as_text(response)
    assert "   4.2 s ago  stalled: rank 1 (a-1 on a): silent" in text
    assert "rank 1: 3 of the last ones, waited for 1.25 s in all" in text
    assert "5: 2 members, 61.0 s ago, replaces generation 4" in text


def test_training_steps_tell_who_computes_longest():
    told = answer()
    assert "training steps" not in as_text(told)
    told.members[2].training.CopyFrom(identity_pb2.Training(steps=10, compute_ms=1000, exposed_ms=300, hidden_ms=50))
    told.members[1].training.CopyFrom(identity_pb2.Training(steps=10, compute_ms=1250, exposed_ms=20, hidden_ms=60))
    lines = as_text(told).splitlines()
    first = lines.index("training steps, means in milliseconds") + 2
    assert [line.split() for line in lines[first : first + 2]] == [
        ["1", "10", "125.0", "2.0", "6.0"],
        ["0", "10", "100.0", "30.0", "5.0"],
    ]
    assert lines[first + 2] == "  rank 1 computes longest, 25.0 ms a step more than the others' mean"
    told.members[1].state = identity_pb2.MEMBER_STATE_LEFT
    assert "computes longest" not in as_text(told)
    told.members[2].state = identity_pb2.MEMBER_STATE_LEFT
    assert "rank 1 computes longest" in as_text(told), "of a job that is over"


def working(*own_ms, steps=100, training=False, **more):
    """Two answers 2 s apart: each rank ends `steps` operations meanwhile, and needs `own_ms` between two of them."""
    before, after = healthy(*[7] * len(own_ms)), healthy(*[7 + steps] * len(own_ms), **more)
    after.headline.MergeFrom(session_pb2.Headline(level="good", title="All ranks work"))
    for member, ms in zip(after.members, own_ms, strict=True):
        member.operation_ms = 2000 - int(ms * steps)
        if training:
            before.members[member.rank].training.CopyFrom(identity_pb2.Training(steps=10, compute_ms=10_000))
            member.training.CopyFrom(identity_pb2.Training(steps=20, compute_ms=10_000 + 10 * ms))
    return after, PreviousStatus(before, 2.0)


def told_under(after, previous=None):
    """The line under the headline's title; empty if there is none."""
    return as_text(after, previous).split("\n\n")[1].partition("\n")[2]


def test_a_good_headline_names_who_is_slowest_in_the_pages_words():
    after, previous = working(5, 15, 5, 5)
    assert told_under(after, previous) == "The slowest is rank 1: 15 ms between two operations, where others need 5.0 ms"
    assert told_under(after) == "", "with one answer nobody knows"
    after.headline.details.append("Next round: x")
    assert told_under(after, previous).startswith("Next round: x; The slowest is rank 1")
    after.headline.level = "warn"
    assert told_under(after, previous) == "Next round: x"


@pytest.mark.parametrize(
    ("own_ms", "steps", "state"),
    [
        ((10, 12, 10), 100, "MEMBER_STATE_ACTIVE"),
        ((1, 1.9), 100, "MEMBER_STATE_ACTIVE"),
        ((9,), 100, "MEMBER_STATE_ACTIVE"),
        ((5, 15), 0, "MEMBER_STATE_ACTIVE"),
        ((5, 15), 100, "MEMBER_STATE_LEFT"),
    ],
    ids=["by less than 30 %", "by the counters' precision", "alone", "no operation ended", "gone"],
)
def test_nobody_is_slowest(own_ms, steps, state):
    after, previous = working(*own_ms, steps=steps, state=state)
    assert told_under(after, previous) == ""


def test_who_is_slow_here_is_slow_on_the_page():
    page = ROOT / "services" / "ferrorpc_coordinator" / "web" / "static" / "model.js"
    assert f"const SLOW_FACTOR = {SLOW_FACTOR};" in page.read_text().splitlines()


def test_where_ranks_train_the_slowest_computes_longest_in_the_last_steps():
    after, previous = working(5, 19, 5, training=True)
    assert told_under(after, previous) == (
        "The slowest is rank 1: 19 ms of computing in a training step, where others need 5.0 ms"
    )
    assert told_under(after) == "", "over all steps it is not slower by much"
    after.members[1].state = identity_pb2.MEMBER_STATE_LEFT
    assert told_under(after, previous) == ""


def test_what_members_say_of_themselves_stays_in_its_place():
    response = answer()
    evil = "\x1b[2J\n0     good  active"
    response.members[0].host = response.members[1].activity = response.headline.title = evil
    response.barriers[0].name = response.generations[0].end_reason = evil
    response.occurrences.add(kind="dead", text=evil)
    text = as_text(response)
    assert "\x1b" not in text
    assert not any(line.startswith("0     good") for line in text.splitlines())
    assert text.count("\\x1b[2J\\n0     good  active") == 6
