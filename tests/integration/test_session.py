"""Members and a real coordinator: joining, failures, barriers, the exchange of ids."""

import gc
import threading
import time
import weakref

import pytest

from ferrorpc.cli import doctor
from ferrorpc.cli.main import run
from ferrorpc.coordination import wait_log
from ferrorpc.errors import (
    AuthenticationError,
    BarrierTimeoutError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigError,
    CoordinatorUnavailableError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    MessageTooLargeError,
    NcclError,
    PeerLostError,
    RendezvousTimeoutError,
    StaleGenerationError,
    UsageError,
)
from ferrorpc.v1.identity_pb2 import Position
from ferrorpc.v1.session_pb2 import Event, GenerationBroken, Result
from ferrorpc.versions import own_version
from ferrorpc.wire.error_detail import detail_of
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join, join_all
from tests.threads import together
from tests.waiting import eventually


@pytest.fixture(scope="module")
def service():
    service = CoordinatorProcess()
    yield service
    service.stop()


@pytest.fixture
def world(service, request):
    """Three members of a job of their own."""
    sessions = join_all(service.address, 3, job=request.node.name[:100])
    yield sessions
    together([session.leave for session in sessions])


def cause_of(session):
    return eventually(lambda: session.membership.latch.cause)


def test_pinned_ranks_are_honoured_and_everyone_knows_everyone(service, world):
    assignments = [session.membership.assignment for session in world]
    assert [a.rank for a in assignments] == [0, 1, 2]
    assert {a.generation for a in assignments} == {1}
    assert {a.cluster_id for a in assignments} == {service.cluster_id}
    assert [peer.name for peer in assignments[2].peers] == ["member-0", "member-1", "member-2"]
    assert "pid" in dict(assignments[0].peers[0].labels)


def test_a_member_says_which_version_it_is_of(world):
    assert world[0].hello("").version == own_version()


def test_two_claimants_of_one_rank_are_both_named(service):
    bodies = [lambda name=name: join(service.address, 0, 2, job="claims", name=name, timeout=1.5) for name in ("one", "two")]
    outcomes = together(bodies)
    refused = [outcome for outcome in outcomes if isinstance(outcome, ConfigError)]
    assert len(refused) == 1
    assert "one" in str(refused[0])
    assert "two" in str(refused[0])


def test_a_round_that_does_not_fill_names_the_missing_ranks(service):
    with pytest.raises(RendezvousTimeoutError) as caught:
        join(service.address, 1, 3, job="lonely", timeout=0.5)
    assert caught.value.missing == [0, 2]
    join(service.address, 1, (1, 3), job="lonely", timeout=5.0).leave()  # it has let go of its name


def test_nobody_at_the_address_is_said_within_the_timeout():
    started = time.monotonic()
    with pytest.raises(CoordinatorUnavailableError, match=r"127\.0\.0\.1:9"):
        join("127.0.0.1:9", 0, 1, timeout=0.5)
    assert time.monotonic() - started < 10


def test_a_name_in_use_is_refused_naming_its_holder_until_the_timeout(service, world, request, caplog, monkeypatch):
    """Meanwhile the log does not say that the coordinator is away: it is there, and refuses."""
    monkeypatch.setattr(wait_log, "EXPLAIN_FIRST_SECONDS", 0.1)
    with pytest.raises(FerroError, match="member-1"):
        join(service.address, 1, 3, job=request.node.name[:100], timeout=2.0)
    assert world[0].membership.latch.cause is None
    assert f"the coordinator at {service.address} refuses this process" in caplog.text
    assert "no coordinator" not in caplog.text


def test_the_timeout_bounds_waiting_for_the_coordinator_and_for_the_others_together(service, request):
    job = request.node.name[:100]
    holder = join(service.address, 0, 1, job=job, name="held")
    timer = threading.Timer(4.0, holder.leave)
    timer.start()
    began = time.monotonic()
    with pytest.raises(RendezvousTimeoutError):
        join(service.address, 0, 2, job=job, name="held", timeout=7.0)
    assert time.monotonic() - began < 10.0, "not 4 s and then 7 s more"
    timer.join()


def test_a_leave_with_a_reason_is_the_others_loss(world):
    world[1].leave("ValueError: no such file")
    for session in (world[0], world[2]):
        cause = cause_of(session)
        assert isinstance(cause, PeerLostError)
        assert (cause.rank, cause.reason) == (1, "ValueError: no such file")


def test_a_reason_as_long_as_a_tensor_is_told_all_the_same(world):
    world[1].leave("ValueError: " + "0.0, " * 1_000_000)
    cause = cause_of(world[0])
    assert (cause.rank, cause.reason[:15]) == (1, "ValueError: 0.0")


def test_a_generation_that_is_told_of_again_is_the_same_one(world):
    """Groups hold its latch: with another in its place nobody would hear of its end."""
    membership = world[0].membership
    position = Position(cluster_id=membership.assignment.cluster_id)
    world[0].result(position, Result(join={"generation": membership.assignment.generation, "rank": 0}))
    assert world[0].membership is membership


def test_a_clean_leave_breaks_nothing(world):
    world[2].leave()
    assert world[0].barrier("b", ranks=[0], timeout=5) == [b""]
    assert world[0].membership.latch.cause is None
    with pytest.raises(GroupClosedError):
        world[2].store.set("late", b"")


def test_what_a_seat_carries_is_closed_before_a_clean_goodbye_and_after_one_with_a_reason(world):
    causes = []
    for session in world[:2]:
        session.on_leave(lambda session=session: causes.append(session.membership.latch.cause))
    world[0].leave()
    world[1].leave("ValueError: bad batch")
    assert causes[0] is None
    assert isinstance(causes[1], PeerLostError)


def test_only_the_rank_whose_deadline_passed_has_timed_out(world):
    world[2].membership.latch.end(CollectiveTimeoutError([0], "all_reduce #4 waited 1 s for rank 0"))
    own = cause_of(world[2])
    assert isinstance(own, CollectiveTimeoutError)
    assert own.waiting_on == [0]
    for session in world[:2]:
        cause = cause_of(session)
        assert isinstance(cause, GroupAbortedError)
        assert (cause.rank, cause.cause) == (2, "all_reduce #4 waited 1 s for rank 0")


def test_a_mismatch_reaches_every_rank_with_all_signatures(world):
    signatures = {0: "all_reduce float32[3]", 1: "all_reduce float32[4]"}
    world[0].membership.latch.end(CollectiveMismatchError(signatures))
    for session in world:
        cause = cause_of(session)
        assert isinstance(cause, CollectiveMismatchError)
        assert cause.signatures == signatures


def test_the_first_cause_stays_on_every_rank(world):
    together([lambda s=session, n=n: s.membership.latch.end(NcclError(f"failure of {n}")) for n, session in enumerate(world)])
    causes = [cause_of(session).message for session in world]
    origin = next(n for n in range(len(world)) if causes[n] == f"failure of {n}")
    others = f"rank {origin} ended the group: failure of {origin}"
    assert causes == [causes[n] if n == origin else others for n in range(len(world))]


def test_a_failure_too_large_for_a_frame_still_ends_the_generation(world):
    world[0].membership.latch.end(CollectiveMismatchError(dict.fromkeys(range(1000), "x" * 1000)))
    assert isinstance(cause_of(world[1]), CollectiveMismatchError)


def test_a_report_keeps_nothing_of_the_step_that_failed(world):
    earlier = world[0].membership.latch
    together([lambda s=session: s.rejoin(20) for session in world])

    class Gradients:
        pass

    def fail():
        gradients = Gradients()
        try:
            raise NcclError("failure")
        except NcclError as error:
            earlier.end(error)
            world[0].membership.latch.end(error)
        return weakref.ref(gradients)

    kept = fail()
    gc.collect()
    assert kept() is None


def test_a_lost_link_between_the_living_ends_the_generation_naming_it(world):
    world[0].report_link_lost(2, "connection reset")
    world[0].report_link_lost(2, "connection reset")
    for session in world:
        cause = cause_of(session)
        assert isinstance(cause, GroupAbortedError)
        assert cause.rank == 0
        assert "rank 0 and rank 2" in cause.cause


def test_a_lost_link_to_one_who_leaves_is_the_end_of_who_still_needs_it(world):
    together([world[2].leave, lambda: world[0].report_link_lost(2, "end of stream")])
    for session in world[:2]:
        assert isinstance(cause_of(session), PeerLostError | GroupAbortedError)


def test_the_end_of_an_earlier_generation_is_not_the_end_of_this_one(world):
    world[0].event(Event(broken=GenerationBroken(generation=0, cause=detail_of(PeerLostError(1, "long ago")))))
    assert world[0].membership.latch.cause is None


def test_what_is_found_out_of_an_earlier_generation_is_not_the_end_of_this_one(world):
    """As by an operation that nobody waited for, or a stream whose end is seen late."""
    before = world[0].membership.latch
    together([lambda s=session: s.rejoin(20) for session in world])
    world[0].report_link_lost(2, "end of stream", before)
    before.end(NcclError("late"))
    assert isinstance(before.cause, NcclError)
    assert world[0].store.keys() == [], "what it sent before has been answered"
    assert [session.membership.latch.cause for session in world] == [None] * 3
    assert not world[0]._links_lost


def test_a_barrier_gathers_payloads_in_rank_order_any_number_of_times(world):
    def thrice(session):
        mine = str(session.membership.assignment.rank).encode()
        return [session.barrier("b", mine + bytes([use]), timeout=20) for use in range(3)]

    expected = [[b"%d%c" % (rank, use) for rank in range(3)] for use in range(3)]
    assert together([lambda s=session: thrice(s) for session in world]) == [expected] * 3


def test_a_barrier_that_lacks_ranks_names_each_and_breaks_nothing(world):
    world[2].activity.note("broadcast #7")
    with pytest.raises(BarrierTimeoutError) as caught:
        world[0].barrier("b", timeout=1.5)
    assert caught.value.missing == [1, 2]
    assert "member-1" in str(caught.value)
    assert "broadcast #7" in str(caught.value)
    assert world[0].membership.latch.cause is None
    assert [len(out) for out in together([lambda s=s: s.barrier("c", timeout=20) for s in world])] == [3, 3, 3]


def test_a_barrier_ends_with_the_generation(world):
    timer = threading.Timer(0.2, lambda: world[2].leave("KeyError: 'x'"))
    timer.start()
    outcomes = together([lambda s=s: s.barrier("b", timeout=30) for s in world[:2]])
    assert [(type(out), out.rank) for out in outcomes] == [(PeerLostError, 2)] * 2
    timer.join()


def test_a_payload_over_the_limit_never_leaves_the_process(world):
    with pytest.raises(MessageTooLargeError, match="payload_bytes is 4096"):
        world[0].barrier("b", bytes(4097))
    with pytest.raises(MessageTooLargeError, match="frame_bytes"):
        world[0].store.wait([f"{n}/" + "k" * 500 for n in range(4000)], timeout=1)
    with pytest.raises(UsageError, match="payload"):
        world[0].barrier("b", "text")
    assert together([lambda s=s: s.barrier("b", bytearray(b"x"), timeout=float("inf")) for s in world]) == [[b"x"] * 3] * 3
    assert world[0].store.add("still") == 1


def test_an_id_reaches_all_ranks_and_a_failure_too(world):
    ranks = [0, 1, 2]
    minted = bytes(range(128))

    def exchange(session, attempt, offer):
        rank = session.membership.assignment.rank
        return session.exchange_nccl_id("world", attempt, ranks, offer if rank == 0 else None, 20)

    failed = together([lambda s=s: exchange(s, 1, NcclError("no device")) for s in world])
    assert all(isinstance(out, FerroError) and "no device" in str(out) for out in failed)
    assert together([lambda s=s: exchange(s, 2, [minted]) for s in world]) == [[minted]] * 3


def test_survivors_of_an_elastic_world_go_on_and_the_store_stays(service):
    sessions = join_all(service.address, 4, (2, 4), job="elastic")
    sessions[0].store.set("kept", b"yes")
    for key, binding in (("counted", "session"), ("swapped", "generation")):
        sessions[1].store.set(key, b"1", bind=binding)
    assert sessions[0].store.add("counted") == 2
    assert sessions[0].store.compare_set("swapped", b"1", b"2")
    sessions[1].leave("killed")
    survivors = [session for session in sessions if session is not sessions[1]]
    memberships = together([lambda s=s: s.rejoin(20) for s in survivors])
    assert sorted(m.assignment.rank for m in memberships) == [0, 1, 2]
    assert {m.assignment.generation for m in memberships} == {2}
    assert all(m.latch.cause is None for m in memberships)
    assert survivors[2].store.get("kept") == b"yes"
    assert survivors[2].store.keys() == ["kept"]
    assert together([lambda s=s: len(s.barrier("b", timeout=20)) for s in survivors]) == [3, 3, 3]
    together([s.leave for s in sessions])


def test_a_fixed_world_goes_on_with_the_replacement(service):
    sessions = join_all(service.address, 3, job="fixed")
    sessions[1].leave("killed")
    bodies = [lambda s=s: s.rejoin(20) for s in (sessions[0], sessions[2])]
    outcomes = together([*bodies, lambda: join(service.address, 1, 3, job="fixed")])
    assert [outcomes[0].assignment.rank, outcomes[2].membership.assignment.rank, outcomes[1].assignment.rank] == [0, 1, 2]
    together([s.leave for s in [*sessions, outcomes[2]]])


def test_joiners_are_pending_and_break_nothing(service):
    sessions = join_all(service.address, 2, (1, 3), job="growing")
    late: list = []
    thread = threading.Thread(target=lambda: late.append(join(service.address, 7, (1, 3), job="growing")))
    thread.start()
    assert eventually(lambda: sessions[0].pending_members) == ["member-7"]
    assert sessions[0].membership.latch.cause is None
    before = sessions[0].membership
    sessions[1].event(Event(pending={"names": ["of the generation before"]}))
    memberships = together([lambda s=s: s.rejoin(20) for s in sessions])
    assert sessions[1].pending_members == []
    thread.join(20)
    assert [m.assignment.size for m in memberships] == [3, 3]
    assert late[0].membership.assignment.generation == 2
    assert before is not sessions[0].membership
    together([s.leave for s in [*sessions, *late]])


def test_a_place_that_was_given_after_its_rank_gave_up_is_found_by_the_next_attempt(service, monkeypatch):
    """The others count on it: to ask for the generation after that one would be to wait for them in vain."""
    session = join(service.address, 0, 1, job="late")
    ask = session._connection.ask

    def gives_up(label, seconds, late, latch=None, **body):
        ask(label, seconds, late, latch, **body)
        raise late("too late")

    with monkeypatch.context() as patch:
        patch.setattr(session._connection, "ask", gives_up)
        with pytest.raises(RendezvousTimeoutError, match="too late"):
            session.rejoin(20)
    assert session.rejoin(20).assignment.generation == 2
    assert session.rejoin(20).assignment.generation == 3
    session.leave()


def test_numbers_of_barriers_begin_anew_before_anybody_sees_the_next_generation(service):
    """Else the second barrier of a thread that saw it at once is given the first one's number, and its result."""
    session = join(service.address, 0, 1, job="early")
    session.barrier("b", timeout=20)
    before = session.membership
    session.rejoin(20)
    session.barrier("b", timeout=20)
    assert (before.ordinals.next("b", (0,)), session.membership.ordinals.next("b", (0,))) == (2, 2)
    session.leave()


def test_members_are_described_by_what_they_last_did(world):
    world[1].activity.note("all_reduce #3")
    known = eventually(lambda: [m for m in world[0].describe([1], 2.0) if m.activity == "all_reduce #3"])
    assert (known[0].rank, known[0].state, known[0].step) == (1, "active", 1)
    assert world[0].describe([-1, len(world), 1 << 40], 2.0) == world[0].describe([], 2.0) == []


def test_an_earlier_generation_is_refused(service):
    sessions = join_all(service.address, 2, (1, 2), job="stale")
    old = sessions[0].membership
    together([lambda s=s: s.rejoin(20) for s in sessions])
    current, sessions[0].membership = sessions[0].membership, old
    with pytest.raises(StaleGenerationError):
        sessions[0].barrier("b", timeout=5)
    sessions[0].membership = current
    together([s.leave for s in sessions])


def test_the_doctor_asks_a_coordinator_that_serves_for_the_job_and_its_version(service, world, capsys, monkeypatch):
    assert run(["doctor", "--coordinator", service.address, "--job", "nobody-is-in-it"]) == 0
    assert "ok    job            job nobody-is-in-it does not exist there yet" in capsys.readouterr().out
    asked = ["doctor", "--coordinator", service.address, "--job", world[0].job]
    assert run(asked) == 0
    told = capsys.readouterr().out
    assert f"ok    coordinator    {service.address} serves" in told
    assert "the coordinator is" not in told
    monkeypatch.setattr(doctor, "own_version", lambda: "0.0.1")
    assert run(asked) == 0
    assert "note  versions       the coordinator is" in capsys.readouterr().out


def test_a_jobs_secret_is_asked_for_and_a_wrong_one_is_refused_at_once(tmp_path):
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("a" * 32)
    wrong.write_text("b" * 32)
    guarded = CoordinatorProcess("--token-file", str(right))
    join(guarded.address, 0, 1, token_file=str(right)).leave()
    for settings in ({"token_file": str(wrong)}, {}):
        started = time.monotonic()
        with pytest.raises(AuthenticationError):
            join(guarded.address, 0, 1, **settings)
        assert time.monotonic() - started < 10
    guarded.stop()
    with pytest.raises(ConfigError, match="token_file"):
        join(guarded.address, 0, 1, token_file=str(tmp_path / "none"))


@pytest.mark.parametrize("all_came_meanwhile", [False, True])
def test_a_barrier_that_was_interrupted_is_gone_on_with_by_the_next_call(world, monkeypatch, all_came_meanwhile):
    """Else this rank would meet the others' next use of the name from then on."""
    zero, one, _ = world

    def interrupted(*_):
        monkeypatch.undo()
        found.extend([one.barrier("x", b"peer", ranks=[0, 1])] if all_came_meanwhile else [])
        raise KeyboardInterrupt

    found = []
    monkeypatch.setattr(zero._connection, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        zero.barrier("x", b"first", ranks=[0, 1])
    calls = [] if all_came_meanwhile else [lambda: one.barrier("x", b"peer", ranks=[0, 1])]
    found += together([lambda: zero.barrier("x", b"again", ranks=[0, 1]), *calls])
    assert found[0] == found[1] in ([b"first", b"peer"], [b"again", b"peer"]), "the peer may come before the second call"
    assert together([lambda s=s: s.barrier("x", b"next", ranks=[0, 1]) for s in (zero, one)]) == [[b"next"] * 2] * 2
    assert not zero._connection._requests.to_send()
