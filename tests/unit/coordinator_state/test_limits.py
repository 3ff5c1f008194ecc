"""Past each limit there is a LimitExceededError that names it, and nothing has changed."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from ferrorpc_coordinator.state import barriers
from ferrorpc_coordinator.state.effects import Note
from ferrorpc_coordinator.state.events import Received
from ferrorpc_coordinator.state.generations import END_REASON_CHARACTERS_MAX
from ferrorpc_coordinator.state.settings import SECOND, Limits, Settings

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import barrier_pb2, error_pb2, identity_pb2, rendezvous_pb2, session_pb2, store_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import add, arrive, ask_elastic, error, join, set_, store


def limited(**limits: int) -> World:
    """A world with these limits, and member "a" in it."""
    world = World(Settings(durable=True, limits=replace(Limits(), **limits)))
    join(world, "a")
    return world


ONE_MESSAGE = ("value_bytes", "payload_bytes", "frame_bytes", "hello_bytes")
"""Limits of the size of one thing that is sent."""


def limit_of(detail: error_pb2.ErrorDetail) -> str:
    named = _named(detail)
    assert detail.code == (ErrorCode.MESSAGE_TOO_LARGE if named in ONE_MESSAGE else ErrorCode.LIMIT_EXCEEDED), detail
    return named


def _named(detail: error_pb2.ErrorDetail) -> str:
    return next(field.text for field in detail.fields if field.name == "limit")


def test_a_value_too_large() -> None:
    world = limited()
    set_(world, "a", "k", b"x" * ((1 << 20) + 1))
    assert limit_of(error(world, "a")) == "value_bytes"


def test_a_value_of_just_the_limit() -> None:
    world = limited()
    result = set_(world, "a", "k", b"x" * (1 << 20))
    assert result is not None
    assert result.store.found


def test_a_unary_request_too_large() -> None:
    world = limited(frame_bytes=1_000)
    wait = store_pb2.WaitOperation(keys=[f"key-{number}" for number in range(200)], wait_ms=1_000)
    value = store_pb2.SetOperation(key="k", value=bytes(2_000))
    refused = world.call(session_pb2.UnaryStoreRequest(job="job", request=store_pb2.StoreRequest(wait=wait)))
    taken = world.call(session_pb2.UnaryStoreRequest(job="job", request=store_pb2.StoreRequest(set=value)))
    asked = world.call(session_pb2.StatusRequest(job="job", token="x" * 2_000))
    exit_ = session_pb2.ProcessExit(name="a", reason="x" * 2_000)
    reported = world.call(session_pb2.UnaryReportRequest(job="job", request=session_pb2.ReportRequest(exit=exit_)))
    for call in (refused, asked, reported):
        detail = world.replies[call]
        assert isinstance(detail, error_pb2.ErrorDetail)
        assert limit_of(detail) == "frame_bytes"
    assert isinstance(world.replies[taken], session_pb2.UnaryStoreResponse)


def test_a_key_too_long() -> None:
    world = limited()
    set_(world, "a", "k" * 513, b"")
    assert limit_of(error(world, "a")) == "key_bytes"


def test_too_many_keys() -> None:
    world = limited(keys=2)
    set_(world, "a", "k1", b"1")
    set_(world, "a", "k2", b"2")
    set_(world, "a", "k3", b"3")
    assert limit_of(error(world, "a")) == "keys"
    result = set_(world, "a", "k2", b"again")
    assert result is not None
    assert result.store.found


def test_too_many_bytes_in_the_store() -> None:
    world = limited(store_bytes=100)
    set_(world, "a", "k", b"x" * 90)
    set_(world, "a", "l", b"x" * 10)
    assert limit_of(error(world, "a")) == "store_bytes"
    store(world, "a", delete=store_pb2.DeleteOperation(key="k"))
    result = set_(world, "a", "l", b"x" * 90)
    assert result is not None
    assert result.store.found


def test_a_payload_too_large() -> None:
    world = limited()
    arrive(world, "a", "b", payload=b"x" * 4097)
    assert limit_of(error(world, "a")) == "payload_bytes"


def test_payloads_that_are_too_large_together_fail_for_all() -> None:
    world = limited(barrier_bytes=6_000)
    join(world, "b", "c")
    arrive(world, "b", "t", generation=0, count=2, payload=b"x" * 4_000)
    arrive(world, "c", "t", generation=0, count=2, payload=b"x" * 4_000)
    assert limit_of(error(world, "b")) == "barrier_bytes"
    assert limit_of(error(world, "c")) == "barrier_bytes"


def test_a_control_frame_too_large() -> None:
    world = limited()
    keys = [f"key-{number}" * 10 for number in range(5_000)]
    store(world, "a", wait=store_pb2.WaitOperation(keys=keys, wait_ms=1_000))
    assert limit_of(error(world, "a")) == "frame_bytes"


def test_too_many_open_requests() -> None:
    world = limited(requests=3)
    for number in range(4):
        world.ask("a", store=store_pb2.StoreRequest(get=store_pb2.GetOperation(key=f"k{number}", wait_ms=9_000)))
    assert limit_of(error(world, "a")) == "requests"


def test_too_many_watches() -> None:
    world = limited(watches=1)
    store(world, "a", watch=store_pb2.WatchOperation(prefix="a"))
    store(world, "a", watch=store_pb2.WatchOperation(prefix="b"))
    assert limit_of(error(world, "a")) == "watches"
    store(world, "a", unwatch=store_pb2.UnwatchOperation(watch_id=1))
    result = store(world, "a", watch=store_pb2.WatchOperation(prefix="b"))
    assert result is not None
    assert result.store.watch_id == 2


def test_a_prefix_of_a_watch_too_long() -> None:
    world = limited()
    store(world, "a", watch=store_pb2.WatchOperation(prefix="k" * 513))
    assert limit_of(error(world, "a")) == "key_bytes"
    result = store(world, "a", watch=store_pb2.WatchOperation(prefix="k" * 512))
    assert result is not None
    assert result.store.found


def test_too_many_keys_that_are_waited_for() -> None:
    world = limited(waited_keys=5)
    join(world, "b")

    def wait(name: str, *keys: str) -> int:
        return world.ask(name, store=store_pb2.StoreRequest(wait=store_pb2.WaitOperation(keys=keys, wait_ms=9_000)))

    first = wait("a", "k", "l", "m")
    wait("b", "k", "l", "n")
    assert limit_of(error(world, "b")) == "waited_keys"
    second = wait("b", "k", "l")
    for key in ("k", "l", "m"):
        set_(world, "a", key, b"")
    assert world.clients["a"].results[first].store.found
    assert world.clients["b"].results[second].store.found
    later = wait("b", "v", "w", "x", "y", "z")  # none of the former are counted any more
    assert later in world.clients["b"].pending
    world.tick(10 * SECOND)
    assert error(world, "b").code == ErrorCode.STORE_TIMEOUT
    assert wait("a", "v", "w", "x", "y", "z") in world.clients["a"].pending


def test_too_many_open_barriers() -> None:
    world = limited(open_barriers=1)
    arrive(world, "a", "x", generation=0, count=2)
    arrive(world, "a", "y", generation=0, count=2)
    assert limit_of(error(world, "a")) == "open_barriers"


def test_too_many_members() -> None:
    world = limited(members=1)
    world.hello("b")
    assert limit_of(world.clients["b"].events[-1].fenced) == "members"


def test_the_highest_generation_that_a_member_may_claim_is_not_the_last() -> None:
    world = limited(generation_number=9)
    world.clients["a"].generation = 10
    join(world, "a")
    assert limit_of(error(world, "a")) == "generation_number"
    world.clients["a"].generation = 9
    for generation in (10, 11):
        join(world, "a")
        assert world.clients["a"].generation == generation


def test_a_replacement_takes_the_place_of_a_suspect_member_and_needs_no_other() -> None:
    world = limited(members=2)
    join(world, "b")
    world.cut("b")
    world.hello("b", instance="2")
    assert world.clients["b"].stream is not None
    world.hello("c")
    assert limit_of(world.clients["c"].events[-1].fenced) == "members"


def test_members_whose_descriptions_are_too_large_together_are_rejected_and_fewer_may_join() -> None:
    world = World(Settings(durable=True, limits=replace(Limits(), world_bytes=2_500)))
    names = ["b", "c", "d"]
    for name in names:
        world.hello(name, labels=[{"name": "note", "value": "x" * 1_000}])
    join(world, *names)
    assert [limit_of(error(world, name)) for name in names] == ["world_bytes"] * 3
    join(world, "b", "c")
    assert [world.clients[name].generation for name in names] == [1, 1, 0]


@pytest.mark.parametrize("low", [2, 1], ids=["fixed", "elastic"])
def test_a_pinned_rank_that_the_world_cannot_have_is_refused_and_not_remembered(low: int) -> None:
    world = limited()
    for rank in range(2, 12):
        policy = rendezvous_pb2.WorldPolicy(min_size=low, max_size=2)
        world.hello("b")
        world.ask("b", join=rendezvous_pb2.JoinRequest(policy=policy, pinned_rank=rank, timeout_ms=1_000))
        assert error(world, "b").code == ErrorCode.INVALID_RANK
    assert not world.coordinator.jobs["job"].rendezvous._claimants


def test_who_gave_up_is_remembered_only_for_those_who_waited_with_it() -> None:
    """A round may stay open for weeks while processes come and give up, each under a new name."""
    world = World()
    for number in range(20):
        join(world, f"m{number}", size=3, timeout_ms=10_000)
        world.tick(6 * SECOND)
    assert len(world.coordinator.jobs["job"].rendezvous._timed_out) <= 2


def test_of_a_heartbeat_the_others_get_only_what_this_version_knows() -> None:
    """Fields of later versions may be of any size, and a frame that is too large for a client ends its session."""
    world = limited()
    member = world.coordinator.jobs["job"].members.get("a")
    training = identity_pb2.Training(steps=7, compute_ms=1, exposed_ms=2, hidden_ms=3)
    later = identity_pb2.Training.FromString(training.SerializeToString() + b"\xfa\x7f\x02xx")
    beat = session_pb2.Beat(step=1, generation=1, training=later)
    world.step(Received(world.clients["a"].stream or 0, session_pb2.ClientFrame(beat=beat)))
    assert member is not None
    assert member.training == training


def test_as_many_members_are_described_as_fit_into_one_frame() -> None:
    world = World(Settings(durable=True, limits=replace(Limits(), frame_bytes=1_000)))
    names = [f"m{number}" for number in range(10)]
    for name in names:
        world.hello(name, labels=[{"name": "note", "value": "x" * 200}])
    join(world, *names)
    asked = world.ask("m0", describe=session_pb2.DescribeRequest())
    described = world.clients["m0"].results[asked].describe
    assert [member.rank for member in described.members] == [0, 1, 2, 3]
    assert described.ByteSize() <= 1_000


def test_the_timeout_of_a_barrier_describes_some_of_many_missing_ranks_and_numbers_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    join(world, "m0", "m1", "m2", "m3", "m4")
    for most, end in ((4, "step 0"), (2, "; and 2 more")):
        monkeypatch.setattr(barriers, "DESCRIBED_MAX", most)
        arrive(world, "m0", f"b{most}", timeout_ms=1_000)
        world.tick(SECOND)
        detail = error(world, "m0")
        assert detail.message.count("present") == most
        assert detail.message.endswith(end)
    (missing,) = [field.integers.values for field in detail.fields if field.name == "missing"]
    assert missing == [1, 2, 3, 4]


def test_the_reason_of_an_end_is_shortened_for_the_status_and_the_cause_is_whole() -> None:
    world = limited()
    failure = error_pb2.ErrorDetail(code=error_pb2.ERROR_CODE_NCCL, message="x" * 50_000)
    world.ask("a", report=session_pb2.ReportRequest(generation=1, failure=failure))
    (told,) = [event.broken for event in world.clients["a"].events if event.HasField("broken")]
    (line,) = world.coordinator.jobs["job"].generations.status()
    assert (len(told.cause.message), len(line.end_reason)) == (50_000, END_REASON_CHARACTERS_MAX)


def test_former_members_do_not_count_toward_the_limit_after_a_restart() -> None:
    world = World(Settings(durable=True, limits=replace(Limits(), members=2)))
    join(world, "a", "b")
    world.ask("b", leave={})
    world.restart()
    world.hello("a", resume=True)
    world.hello("c")
    assert world.clients["c"].stream is not None
    world.hello("d")
    assert limit_of(world.clients["d"].events[-1].fenced) == "members"


def test_kept_outcomes_of_barriers_are_limited_in_bytes() -> None:
    world = limited(remembered_barrier_bytes=2 * barriers.OUTCOME_BYTES + 1_000)
    for ordinal in range(1, 6):
        arrive(world, "a", "epoch", ordinal=ordinal, payload=b"x" * 400)
    remembered = [key for table, key in world.rows if table == "barrier"]
    assert [key.rpartition("1/")[2] for key in remembered] == ["4/epoch", "5/epoch"]


def test_a_hello_too_large() -> None:
    world = World()
    world.hello("a", address="x" * (17 << 10))
    assert limit_of(world.clients["a"].events[-1].fenced) == "hello_bytes"


@pytest.mark.parametrize("name", ["", "a b", "a/b", "ä", "a\n"])
def test_a_name_that_cannot_be_part_of_a_journal_key(name: str) -> None:
    world = World()
    world.hello(name)
    assert world.clients[name].events[-1].fenced.code == ErrorCode.CONFIG


def test_too_many_jobs_unless_one_has_ended() -> None:
    world = limited(jobs=1)
    other = session_pb2.UnaryStoreRequest(job="other", request=store_pb2.StoreRequest(add=store_pb2.AddOperation(key="n")))
    refused = world.replies[world.call(other)]
    assert isinstance(refused, error_pb2.ErrorDetail)
    assert limit_of(refused) == "jobs"
    set_(world, "a", "k", b"v", request_id=1)
    world.ask("a", leave={})
    assert isinstance(world.replies[world.call(other)], session_pb2.UnaryStoreResponse)
    assert {key for table, key in world.rows if table != "meta"} == {"other/n"}


@pytest.mark.parametrize("wrong", [{"member": "b c"}, {"address": "x" * (17 << 10)}, {"resume_token": "of another cluster"}])
def test_a_hello_that_is_refused_does_not_forget_a_job_that_has_ended(wrong: dict[str, str]) -> None:
    world = limited(jobs=1)
    set_(world, "a", "k", b"v")
    world.ask("a", leave={})
    world.job = "other"
    name = wrong.pop("member", "b")
    world.hello(name, **wrong)
    assert world.clients[name].stream is None
    assert list(world.coordinator.jobs) == ["job"]
    assert len(world.coordinator.jobs["job"].store.keyspace) == 1


def test_a_unary_request_that_is_refused_does_not_forget_a_job_that_has_ended() -> None:
    world = limited(jobs=1)
    world.ask("a", leave={})
    keys = store_pb2.StoreRequest(keys=store_pb2.KeysOperation(prefix="x" * (300 << 10)))
    for client, request in (("b c", store_pb2.StoreRequest()), ("b", keys)):
        world.call(session_pb2.UnaryStoreRequest(job="other", client_id=client, request=request))
    removal = session_pb2.ReportRequest(removal=session_pb2.Removal(name="a"))
    reply = world.replies[world.call(session_pb2.UnaryReportRequest(job="other", request=removal))]
    assert isinstance(reply, error_pb2.ErrorDetail)
    assert "there is no job 'other' here" in reply.message
    assert list(world.coordinator.jobs) == ["job"]


def test_the_job_that_is_forgotten_for_a_new_one_ended_first() -> None:
    """Not the one that began first, which may run for weeks and have no living process only until its next ones start."""
    world = limited(jobs=3)
    value = store_pb2.StoreRequest(set=store_pb2.SetOperation(key="checkpoint", value=b"7"))
    for seconds, job in enumerate(("earlier", "later"), 1):
        world.tick(seconds * SECOND)
        world.call(session_pb2.UnaryStoreRequest(job=job, request=value))
    world.tick(SECOND)
    world.ask("a", leave={"reason": "killed"})
    world.call(session_pb2.UnaryStoreRequest(job="new", request=value))
    assert set(world.coordinator.jobs) == {"job", "later", "new"}
    (note,) = [effect for effect in world.effects if isinstance(effect, Note)]
    assert (note.job, note.kind) == ("earlier", "forgotten")


def test_keys_come_in_pages() -> None:
    world = limited(page_bytes=40)
    for number in range(10):
        set_(world, "a", f"k{number}", b"")
    set_(world, "a", "other", b"")
    seen: list[str] = []
    pages = 0
    after, more = "", True
    while more:
        result = store(world, "a", keys=store_pb2.KeysOperation(prefix="k", after=after))
        assert result is not None
        seen.extend(result.store.keys)
        after, more = seen[-1], result.store.more
        pages += 1
    assert seen == [f"k{number}" for number in range(10)]
    assert pages == 2


def test_a_job_that_a_call_waits_in_has_not_ended() -> None:
    world = World(Settings(durable=True, limits=replace(Limits(), jobs=1)))
    wait = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k", wait_ms=60_000))
    waits = world.call(session_pb2.UnaryStoreRequest(job="job", request=wait))
    refused = world.replies[world.call(session_pb2.UnaryStoreRequest(job="other", request=wait))]
    assert isinstance(refused, error_pb2.ErrorDetail)
    assert limit_of(refused) == "jobs"
    assert waits not in world.replies


def test_kept_answers_of_a_session_are_limited_in_bytes_and_a_larger_one_is_given_anew() -> None:
    world = limited(remembered_result_bytes=1_000)
    member = world.coordinator.jobs["job"].members.get("a")
    assert member is not None
    for size in (400, 400, 400, 2_000):
        set_(world, "a", "k", bytes(size))
        get = store_pb2.StoreRequest(get=store_pb2.GetOperation(key="k"))
        number = world.ask("a", store=get)
        assert member.answer_bytes == sum(answer.ByteSize() for answer in member.answers.values()) <= 1_000
    assert number not in member.answers
    assert member.answers, "the smaller ones before it are still there"
    del world.clients["a"].results[number]
    world.step(Received(world.clients["a"].stream or 0, session_pb2.ClientFrame(sequence=number, store=get)))
    assert len(world.clients["a"].results[number].store.value) == 2_000


def test_links_past_their_limit_are_not_kept_and_known_ones_are_updated() -> None:
    world = limited(links=2)
    member = world.coordinator.jobs["job"].members.get("a")
    for links in ([(1, 10), (2, 20), (3, 30)], [(2, 25), (4, 40)]):
        told = [identity_pb2.Link(peer_rank=peer, kind="grpc", sent_bytes=sent) for peer, sent in links]
        beat = session_pb2.ClientFrame(beat=session_pb2.Beat(generation=1, links=told))
        world.step(Received(world.clients["a"].stream or 0, beat))
    assert member is not None
    assert member.links == {1: ("grpc", 10), 2: ("grpc", 25)}


def test_a_page_has_a_key_even_if_that_is_larger() -> None:
    world = limited(page_bytes=10)
    for key in ("k" * 30, "l" * 30):
        set_(world, "a", key, b"")
    result = store(world, "a", keys=store_pb2.KeysOperation())
    assert result is not None
    assert (list(result.store.keys), result.store.more) == (["k" * 30], True)


def test_nothing_grows_without_bound() -> None:
    """Hundreds of everything, one after the other: all that is kept stays within its limits."""
    limits = replace(
        Limits(),
        remembered_barriers=16,
        remembered_writes=8,
        remembered_clients=4,
        members=4,
        gone_members=8,
        history_events=32,
        generations=4,
    )
    world = World(Settings(durable=True, limits=limits))
    ask_elastic(world, "a", 1, 2)
    for number in range(1, 301):
        add(world, "a", "counter", request_id=number)
        arrive(world, "a", "epoch", ordinal=number)
        arrive(world, "a", "tool", ordinal=number, generation=0, count=1)
        world.clients["a"].results.clear()
        world.clients["a"].positions.clear()
        world.take()
    unary = barrier_pb2.BarrierRequest(name="t", count=1, ordinal=1, timeout_ms=1_000)
    for number in range(50):
        request = store_pb2.StoreRequest(request_id=1, add=store_pb2.AddOperation(key="n", amount=1))
        world.call(session_pb2.UnaryStoreRequest(job="job", client_id=f"c{number}", request=request))
        world.call(session_pb2.UnaryBarrierRequest(job="job", client_id=f"c{number}", request=unary))
        for name in ("a", f"b{number}"):
            ask_elastic(world, name, 1, 2, last_call_ms=1)
        world.ask(f"b{number}", leave={})
    tables = Counter(table for table, _ in world.rows)
    assert tables["member"] <= 8 + 4
    assert tables["generation"] == 4
    assert len(world.rows) < 70
    assert len(world.coordinator._calls) == 0
    assert len(world.coordinator._shared.deadlines) < 10
    job = world.coordinator.jobs["job"]
    assert len(list(job.members)) <= 8 + 4
    assert len(job.generations.history) == 4
    assert sorted(job.store.write_results.clients()) == ["/c46", "/c47", "/c48", "/c49", "a#1"]
    assert len(job.store.watches._history) == 32
    member = job.members.get("a")
    assert member is not None
    assert len(member.answers) <= limits.remembered_results
