"""The gRPC backend as a world of threads, each with its own server: operations, bits, failure and the next generation."""

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from ferrorpc.backends.base import Backend
from ferrorpc.backends.registry import Place, create
from ferrorpc.backends.simulated import SimulatedBackend
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.coordination.base import Membership
from ferrorpc.coordination.local import LocalSession, LocalWorld
from ferrorpc.errors import (
    CollectiveMismatchError,
    FerroError,
    GroupAbortedError,
    GroupClosedError,
    LimitExceededError,
    PeerLostError,
    RendezvousTimeoutError,
)
from ferrorpc.group import ProcessGroup
from ferrorpc.guard import Guard
from ferrorpc.testing import run_groups
from ferrorpc.testing.reference import worst_rounding
from ferrorpc.transports.credit import EAGER_BYTES
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.codecs import CODEC_NAMES
from ferrorpc.wire.frames import Key
from ferrorpc.wire.token import Token
from tests.integration.slow_link import SlowLink, slow_link
from tests.threads import results_of, together

SECONDS = 30.0


class Announced(LocalSession):
    """A local session whose members know each other's addresses, as they do through a coordinator."""

    addresses: dict[str, str]

    def assign(self, membership: Membership) -> None:
        assignment = membership.assignment
        peers = tuple(dataclasses.replace(peer, address=self.addresses.get(peer.name, "")) for peer in assignment.peers)
        super().assign(dataclasses.replace(membership, assignment=dataclasses.replace(assignment, peers=peers)))


class GrpcWorld:
    """A world of `size` ranks with a server each.

    Args:
        transport: what all ranks are told to use, or each of them.
    """

    def __init__(self, size: int, min_size: int | None = None, transport: str | Sequence[str] = "grpc", lanes: int = 1) -> None:
        transports = [transport] * size if isinstance(transport, str) else transport
        self.world = LocalWorld(size, min_size=min_size)
        self.servers = [WorkerServer("127.0.0.1", "127.0.0.1", Token(fixed="token"), lanes=lanes) for _ in range(size)]
        addresses = {f"member-{rank}": server.address for rank, server in enumerate(self.servers)}
        places = []
        for rank, server in enumerate(self.servers):
            session = self.world.session(rank)
            session.__class__ = Announced
            session.addresses = addresses
            session.assign(session.membership)
            places.append(Place(session, server, transports[rank], timeout=SECONDS))
        with ThreadPoolExecutor(size) as pool:
            self.backends: list[Backend] = list(pool.map(lambda place: create("auto", place), places))

    def __enter__(self) -> "GrpcWorld":
        return self

    def __exit__(self, *error: object) -> None:
        for backend in self.backends:
            backend.close()
        for server in self.servers:
            server.close()


def on_every_rank(backends: list[Backend], body: Callable[[Backend], Any]) -> list[Any]:
    """What `body` returns or raises on every rank, each in a thread."""
    return together([partial(body, backend) for backend in backends])


def values_of(rank: int, size: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


def all_reduce(backend: Backend, size: int, number: int = 1, wire: str | None = None) -> np.ndarray:
    call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (size,)),), op=ReduceOp.SUM, wire=wire)
    execution = backend.prepare(call).start(
        Key(0, 0, number), [values_of(backend.rank, size)], None, Guard(backend.clock, backend.latch, SECONDS)
    )
    return backend.run(execution)[0]


@pytest.mark.parametrize("size", [0, 1, 1_000, 1_500_000])
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce_over_grpc_is_the_left_fold_and_bitwise_that_of_the_simulated_world(world_size: int, size: int) -> None:
    with GrpcWorld(world_size) as world:
        assert {backend.name for backend in world.backends} == {"grpc"}
        results = on_every_rank(world.backends, lambda backend: all_reduce(backend, size))
    expected = values_of(0, size)
    for rank in range(1, world_size):
        expected = expected + values_of(rank, size)
    simulated = on_every_rank(SimulatedBackend.create_group(world_size), lambda backend: all_reduce(backend, size))
    for result in (*results, *simulated):
        assert result.tobytes() == expected.tobytes()


def test_large_messages_are_dealt_out_to_several_lanes_and_the_bits_stay_the_same() -> None:
    size = 4_000_003
    expected = (values_of(0, size) + values_of(1, size)).tobytes()
    with GrpcWorld(2, lanes=3) as world:
        for number in (1, 2):
            results = on_every_rank(world.backends, lambda backend, n=number: all_reduce(backend, size, n))
            assert [result.tobytes() for result in results] == [expected] * 2
        for backend in world.backends:
            ((_, sent_bytes),) = backend.transport.traffic().values()
            assert sent_bytes == 2 * 4 * size
            own, lanes = (backend.transport._links[peer].lanes for peer in (backend.rank, 1 - backend.rank))
            assert not own
            assert sorted(lanes) == [0, 1, 2]
            assert all(lane.queue.sent_bytes > sent_bytes // 5 for lane in lanes.values())


@pytest.mark.parametrize("wire", CODEC_NAMES)
def test_compressed_messages_give_every_rank_the_same_bits(wire: str) -> None:
    size = 70_001
    with GrpcWorld(3) as world:
        results = on_every_rank(world.backends, lambda backend: all_reduce(backend, size, wire=wire))
    given = [values_of(rank, size) for rank in range(3)]
    exact = sum(given)
    assert {result.tobytes() for result in results} == {results[0].tobytes()}
    assert np.abs(results[0] - exact).max() < 3 * worst_rounding(wire, [*given, exact])


def test_send_and_recv_keep_the_order_of_the_calls() -> None:
    def body(backend: Backend) -> list[np.ndarray] | None:
        if backend.rank == 0:
            for number in range(5):
                backend.send(np.full(300_000 * number, number, np.int64), 1, tag=3)
            return None
        return [backend.recv(0, tag=3, timeout=SECONDS) for _ in range(5)]

    with GrpcWorld(2) as world:
        _, received = on_every_rank(world.backends, body)
    for number, array in enumerate(received):
        np.testing.assert_array_equal(array, np.full(300_000 * number, number, np.int64))


def test_a_hundred_barriers() -> None:
    with GrpcWorld(4) as world:
        assert on_every_rank(world.backends, lambda backend: [backend.barrier() for _ in range(100)] and None) == [None] * 4


def test_ranks_that_call_different_shapes_all_learn_both_signatures() -> None:
    with GrpcWorld(2) as world:
        outcomes = on_every_rank(world.backends, lambda backend: all_reduce(backend, 10 + backend.rank))
    for outcome in outcomes:
        assert isinstance(outcome, CollectiveMismatchError)
        assert len(outcome.signatures) == 2


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_call_in_which_ranks_disagree_has_no_result(world_size: int) -> None:
    """Although nothing about the messages but their signature is different."""

    def body(backend: Backend) -> list[np.ndarray]:
        op = ReduceOp.SUM if backend.rank else ReduceOp.MAX
        call = Call(Operation.ALL_REDUCE, (TensorSpec(DType.FLOAT32, (8,)),), op=op)
        guard = Guard(backend.clock, backend.latch, SECONDS)
        return backend.run(backend.prepare(call).start(Key(0, 0, 1), [values_of(backend.rank, 8)], None, guard))

    for _ in range(5):
        with GrpcWorld(world_size) as world:
            outcomes = on_every_rank(world.backends, body)
        assert {type(outcome) for outcome in outcomes} == {CollectiveMismatchError}


def test_a_call_by_messages_learns_that_a_peer_had_another_in_shared_memory_and_left_it() -> None:
    """In a reduce to rank 1, rank 0 is done once its array lies where rank 1 finds it."""

    def run(backend: Backend, call: Call) -> list[np.ndarray]:
        guard = Guard(backend.clock, backend.latch, 10.0)
        return backend.run(backend.prepare(call).start(Key(0, 0, 2), [values_of(backend.rank, 8)], None, guard))

    def body(backend: Backend) -> list[np.ndarray]:
        all_reduce(backend, 8)
        if backend.rank == 0:
            return run(backend, Call(Operation.REDUCE, spec, ReduceOp.SUM, root=1))
        return run(backend, Call(Operation.ALL_REDUCE, spec, ReduceOp.SUM, algorithm="ring"))

    spec = (TensorSpec(DType.FLOAT32, (8,)),)

    with GrpcWorld(2, transport="shared_memory") as world:
        finished, error = on_every_rank(world.backends, body)
    assert not isinstance(finished, FerroError)
    assert isinstance(error, CollectiveMismatchError)
    assert error.signatures == {0: "reduce(op=sum, float32[8], root=1)", 1: "all_reduce(op=sum, float32[8], algorithm=ring)"}


def test_a_rank_that_has_left_is_the_peers_loss_only_where_it_is_needed() -> None:
    with GrpcWorld(3) as world:
        results_of(on_every_rank(world.backends, lambda backend: backend.barrier()))
        world.backends[2].close()
        session = world.backends[2].session
        assert session is not None
        session.leave()
        outcomes = on_every_rank(world.backends[:2], lambda backend: all_reduce(backend, 5, number=9))
    for outcome in outcomes:
        assert isinstance(outcome, PeerLostError)
        assert outcome.rank == 2
        assert "it left the job" in outcome.message


@pytest.mark.parametrize("transport", ["grpc", "shared_memory"])
def test_who_receives_from_a_rank_that_has_left_for_the_next_generation_goes_on_and_meets_it_there(transport: str) -> None:
    def body(group: ProcessGroup) -> int:
        if group.rank == 2:
            group.send(np.ones(3), 0, tag=1)
        else:
            if group.rank == 0:
                posted = group.recv(2, async_op=True)
                with pytest.raises(PeerLostError, match="rank 2 has left: it closed the group, or called reform"):
                    posted.wait()
                assert group.recv(2, tag=1).tolist() == [1.0] * 3
            group.send(np.ones(3), 1 - group.rank)
            assert group.recv(1 - group.rank).tolist() == [1.0] * 3
        with group.reform() as renewed:
            return int(renewed.all_reduce(1))

    with GrpcWorld(3, transport=transport) as world:
        assert run_groups([ProcessGroup(backend, SECONDS) for backend in world.backends], body) == [3, 3, 3]


def test_the_next_generation_works_on_the_same_servers() -> None:
    def renewed(backend: Backend) -> Backend:
        backend.latch.end(GroupAbortedError(0, "a test"))
        return backend.renew(SECONDS)

    with GrpcWorld(3) as world:
        results_of(on_every_rank(world.backends, lambda backend: all_reduce(backend, 100_000)))
        world.backends = on_every_rank(world.backends, renewed)
        assert [backend.session.membership.assignment.generation for backend in world.backends] == [2, 2, 2]
        results = on_every_rank(world.backends, lambda backend: all_reduce(backend, 100_000))
    assert len({result.tobytes() for result in results}) == 1


def test_what_was_sent_before_a_close_arrives_though_the_link_is_slow() -> None:
    """Some seconds of it are still on their way then."""
    x = np.arange(1 << 21, dtype=np.float32)

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(x, 1)
        else:
            np.testing.assert_array_equal(group.recv(0), x)

    with GrpcWorld(2) as world, slow_link(world.servers[1].address, bytes_per_second=3_000_000) as link:
        _lead_through(link, world.backends[0], 1)
        run_groups([ProcessGroup(backend) for backend in world.backends], body)


def test_what_was_sent_before_a_close_arrives_though_its_stream_opens_long_after_the_receiver_asked_for_it() -> None:
    """What the receiver asks reaches the closing rank at once, and is no reason to tell it that the rank has left."""

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(np.ones(3), 1)
        else:
            np.testing.assert_array_equal(group.recv(0), np.ones(3))

    with GrpcWorld(2) as world, slow_link(world.servers[1].address, bytes_per_second=100) as link:
        _lead_through(link, world.backends[0], 1)
        run_groups([ProcessGroup(backend) for backend in world.backends], body)


def test_a_close_says_for_whom_it_waits_and_that_it_gave_up_and_the_peer_hears_that_the_link_was_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ferrorpc.backends.message.CLOSE_SECONDS", 2.0)
    monkeypatch.setattr("ferrorpc.transports.closing.EXPLAIN_SECONDS", 0.5)
    heard: list[str] = []

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            group.send(np.ones(1 << 20, np.float32), 1)
            group.close()
            link.close()
        else:
            with pytest.raises(PeerLostError) as caught:
                group.recv(0, timeout=SECONDS)
            heard.append(str(caught.value))

    with GrpcWorld(2) as world, slow_link(world.servers[1].address, bytes_per_second=100_000) as link:
        _lead_through(link, world.backends[0], 1)
        with caplog.at_level("WARNING", "ferrorpc.transports"):
            run_groups([ProcessGroup(backend) for backend in world.backends], body)
    waited, gave_up = [record.getMessage() for record in caplog.records if record.name == "ferrorpc.transports"]
    assert waited == "rank 0 closes once rank 1 has received all that it sent"
    assert re.fullmatch(r"rank 0 closes after \d\.\d s, before rank 1 has confirmed that all it sent arrived", gave_up)
    assert "rank 0 was lost: it left the job" in heard[0]
    assert "its link was lost before" in heard[0]
    assert "look at the log of rank 0, and at the network between the two hosts" in heard[0]


def test_a_rank_that_left_before_it_was_dialled_is_no_matter_of_the_network() -> None:
    left = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            group.close()
            left.set()
            return
        assert left.wait(SECONDS)
        told = r"^rank 1 was lost: it left the job, and an operation here still needs it\ntry: look at the log of rank 1, which"
        with pytest.raises(PeerLostError, match=told):
            group.all_reduce(np.ones(3))

    with GrpcWorld(2) as world:
        run_groups([ProcessGroup(backend) for backend in world.backends], body)


def test_a_rank_that_fails_in_reform_once_it_has_its_place_tells_the_others_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said goodbye there, and lives."""
    start, failed = HostPeers.start, threading.Event()

    def refused(host_peers: HostPeers, *callbacks: Any) -> None:
        if host_peers.rank == 0 and host_peers.latch is not world.backends[0].latch:
            raise LimitExceededError("the system refuses a thread")
        start(host_peers, *callbacks)

    def body(group: ProcessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(LimitExceededError, match=r"^the system refuses a thread"):
                group.reform()
            failed.set()
        else:
            with group.reform() as renewed:
                assert failed.wait(SECONDS)
                with pytest.raises(LimitExceededError, match="rank 0 ended the group: the system refuses a thread"):
                    renewed.all_reduce(1.0)

    with GrpcWorld(2, transport="auto") as world:
        monkeypatch.setattr(HostPeers, "start", refused)
        run_groups([ProcessGroup(backend) for backend in world.backends], body)


def test_a_reform_that_may_take_a_second_does_not_wait_for_a_slow_link_beyond_that() -> None:
    over = threading.Event()

    def body(group: ProcessGroup) -> None:
        if group.rank == 1:
            assert over.wait(SECONDS)
            return
        group.send(np.ones(1 << 20, np.float32), 1)
        began = group.session.clock.now()
        with pytest.raises(RendezvousTimeoutError):
            group.reform(1.0)
        assert group.session.clock.now() - began < 6.0
        over.set()

    with GrpcWorld(2) as world, slow_link(world.servers[1].address, bytes_per_second=400_000) as link:
        _lead_through(link, world.backends[0], 1)
        run_groups([ProcessGroup(backend) for backend in world.backends], body)


def _lead_through(link: SlowLink, backend: Backend, peer: int) -> None:
    """What a rank sends to a peer takes this link."""
    transport = backend.transport
    peers = list(transport.assignment.peers)
    peers[peer] = dataclasses.replace(peers[peer], address=link.address)
    transport.assignment = dataclasses.replace(transport.assignment, peers=tuple(peers))


def test_a_recv_from_a_rank_that_closed_the_subgroup_does_not_wait_for_another_send_of_it_that_has_begun() -> None:
    told = threading.Event()
    sent = np.ones(4 * EAGER_BYTES, np.uint8)

    def body(group: ProcessGroup) -> None:
        sub = group.subgroup([0, 1])
        assert sub is not None
        if group.rank == 0:
            work = sub.send(sent, 1, tag=1, async_op=True)
            group.barrier()
            sub.close()
            group.barrier()
            assert told.wait(20.0)
            work.wait()
            return
        group.barrier()
        group.barrier()
        try:
            with pytest.raises(GroupClosedError, match="rank 0 has closed this subgroup"):
                sub.recv(0, tag=2, timeout=10.0)
        finally:
            told.set()
        np.testing.assert_array_equal(sub.recv(0, tag=1), sent)

    with GrpcWorld(2) as world:
        run_groups([ProcessGroup(backend, timeout=20.0) for backend in world.backends], body)
