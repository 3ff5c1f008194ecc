"""Chunks go on while others still arrive, in whatever order messages come, and the bits stay those of the plan."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
import pytest

from ferrorpc import ProcessGroup
from ferrorpc.collectives import executor, outgoing_message
from ferrorpc.collectives.call import Call, Operation
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.point_to_point import RecvExecution
from ferrorpc.collectives.prepared import PlanPrepared
from ferrorpc.collectives.select import plan_for
from ferrorpc.errors import CodecError, CollectiveMismatchError, FerroError, TensorMismatchError
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.guard import SYSTEM_CLOCK, Guard, Latch
from ferrorpc.testing import FaultPlan, VirtualClock, run_world
from ferrorpc.transports import mailbox as mailboxes, point_to_point as inbound
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.codecs import CODEC_NAMES, codec
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Header, Key

KEY = Key(0, 0, 1)
CHUNK = 1024
"""Bytes of a chunk in these tests: 256 float32, one block of int8."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing_message, "CHUNK_BYTES", CHUNK)
    for module in (outgoing_message, mailboxes, inbound):
        monkeypatch.setattr(module, "EAGER_BYTES", 4 * CHUNK)
    for module in (outgoing_message, executor):
        monkeypatch.setattr(module, "CODED_VALUES", CHUNK // 4)
    monkeypatch.setattr(executor, "_LOCAL_ELEMENTS", CHUNK // 4)


class Wire(Transport):
    """Rank 0 of some: what it sends is kept, what it receives is put in by the test."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.failures: list[FerroError] = []
        self.mailbox = Mailbox(0, self.failures.append)
        self.sent: list[tuple[int, int, int, bytes]] = []
        """(peer, slot, offset, payload)"""
        self.granted: list[tuple[int, int]] = []
        self.probed: list[int] = []
        self.full = False
        self.rooms: list[Callable[[], None]] = []
        self.wakes = 0
        """How often the driver was woken."""
        self.not_reached: dict[int, str] = {}
        self.lost_links: dict[int, str] = {}

    def send(self, peer: int, key: Key, header: Header, offset: int, payload: Any, room: Callable[[], None]) -> bool:
        if self.full:
            self.rooms.append(room)
            return False
        self.sent.append((peer, header.slot, offset, b"" if payload is None else payload.tobytes()))
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self.granted.append((peer, slot))

    def probe(self, peer: int, key: Key, signature: str) -> None:
        self.probed.append(peer)

    def unreached(self) -> dict[int, str]:
        return self.not_reached

    def lost(self) -> dict[int, str]:
        return self.lost_links

    def close(self, timeout: float) -> None:
        """Nothing to close."""

    def wake(self) -> None:
        self.wakes += 1

    def arrive(self, source: int, key: Key, header: Header, offset: int, payload: bytes) -> None:
        self.mailbox.deliver(Frame(key, source, header, offset, memoryview(payload)))


def start(
    wire: Wire, call: Call, *inputs: np.ndarray, out: np.ndarray | None = None, ranks: tuple[int, ...] | None = None
) -> Execution:
    """`ranks`: world rank of each group rank, where these are not the same."""
    plan = plan_for(call, 0, wire.size)
    prepared = PlanPrepared(wire, ranks or range(wire.size), 0, call, plan, lambda ranks: "")
    execution = prepared.start(KEY, inputs, None if out is None else [out], Guard(SYSTEM_CLOCK, Latch(), 20.0))
    execution.wake = wire.wake
    return execution


def begin(wire: Wire, call: Call, *inputs: np.ndarray, out: np.ndarray | None = None) -> Execution:
    execution = start(wire, call, *inputs, out=out)
    assert not execution.advance()
    return execution


def all_reduce(count: int, wire: str | None = None) -> Call:
    spec = TensorSpec(DType.FLOAT32, (count,))
    return Call(Operation.ALL_REDUCE, (spec,), ReduceOp.SUM, wire=wire, algorithm="two_shot")


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def results(wire: Wire, peer: int) -> list[int]:
    return [offset for target, slot, offset, _ in wire.sent if (target, slot) == (peer, 1)]


def test_what_is_reduced_of_a_slice_is_sent_on_while_the_rest_still_arrives() -> None:
    wire, mine, theirs = Wire(2), numbers(2048), numbers(2048, 1)
    execution = begin(wire, all_reduce(2048), mine)
    header = Header(0, all_reduce(2048).signature, DType.FLOAT32, (1024,), 4096)
    for chunk in range(4):
        assert results(wire, 1) == [CHUNK * earlier for earlier in range(chunk)]
        part = theirs[256 * chunk : 256 * (chunk + 1)]
        wire.arrive(1, KEY, header, CHUNK * chunk, part.tobytes())
        assert wire.sent[-1] == (1, 1, CHUNK * chunk, (mine[256 * chunk : 256 * (chunk + 1)] + part).tobytes())
    back = Header(1, all_reduce(2048).signature, DType.FLOAT32, (1024,), 4096)
    for chunk in range(4):
        wire.arrive(1, KEY, back, CHUNK * chunk, theirs[1024 + 256 * chunk : 1024 + 256 * (chunk + 1)].tobytes())
    assert execution.advance()
    assert execution.results[0].tobytes() == np.concatenate([mine[:1024] + theirs[:1024], theirs[1024:]]).tobytes()


def test_chunks_of_a_later_rank_wait_for_those_of_an_earlier_one_and_are_taken_as_these_come() -> None:
    wire, mine = Wire(3), numbers(3072)
    begin(wire, all_reduce(3072), mine)
    header = Header(0, all_reduce(3072).signature, DType.FLOAT32, (1024,), 4096)
    parts = {source: numbers(1024, source) for source in (1, 2)}
    for chunk in range(2):
        wire.arrive(2, KEY, header, CHUNK * chunk, parts[2][256 * chunk : 256 * (chunk + 1)].tobytes())
    assert results(wire, 1) == results(wire, 2) == []
    wire.arrive(1, KEY, header, 0, parts[1][:256].tobytes())
    assert results(wire, 1) == results(wire, 2) == [0]
    expected = (mine[:256] + parts[1][:256]) + parts[2][:256]
    assert [payload for _, slot, _, payload in wire.sent if slot == 1] == [expected.tobytes()] * 2


def test_in_place_nothing_that_is_still_to_be_sent_is_overwritten() -> None:
    """The peer's result would fit where the part that has not gone yet lies."""
    wire, mine = Wire(2), numbers(4096)
    before = mine.copy()
    wire.full = True
    execution = begin(wire, all_reduce(4096), mine, out=mine)
    back = Header(1, all_reduce(4096).signature, DType.FLOAT32, (2048,), 8192)
    wire.arrive(1, KEY, back, 0, bytes(CHUNK))
    assert mine.tobytes() == before.tobytes()
    wire.full = False
    for room in wire.rooms:
        room()
    assert wire.wakes
    assert not wire.sent
    assert not execution.advance()
    assert [offset for _, slot, offset, _ in wire.sent if slot == 0] == [0, CHUNK, 2 * CHUNK, 3 * CHUNK]
    assert wire.sent[0][3] == before[2048:2304].tobytes()
    assert not mine[2048:2304].any()
    assert mine[2304:].tobytes() == before[2304:].tobytes()
    assert not execution.advance()


def test_only_eager_chunks_go_before_the_grant_and_the_driver_tries_a_full_lane_again_when_it_has_room() -> None:
    wire = Wire(2)
    execution = begin(wire, all_reduce(16 * 256), numbers(16 * 256))
    assert len(wire.sent) == 4
    wire.full = True
    wire.mailbox.granted(1, KEY, 0)
    assert len(wire.sent) == 4
    wire.full = False
    wire.rooms[0]()
    assert wire.wakes == 1
    assert len(wire.sent) == 4
    assert not execution.advance()
    assert [offset for _, _, offset, _ in wire.sent] == [CHUNK * number for number in range(8)]


def test_a_grant_is_all_that_the_rest_of_a_message_waits_for() -> None:
    wire = Wire(2)
    begin(wire, all_reduce(16 * 256), numbers(16 * 256))
    wire.mailbox.granted(1, KEY, 0)
    assert [offset for _, _, offset, _ in wire.sent] == [CHUNK * number for number in range(8)]


def test_peers_may_cut_their_messages_into_chunks_of_different_sizes() -> None:
    wire, mine = Wire(3), numbers(3072)
    begin(wire, all_reduce(3072), mine)
    header = Header(0, all_reduce(3072).signature, DType.FLOAT32, (1024,), 4096)
    parts = {source: numbers(1024, source) for source in (1, 2)}
    for source, step in ((1, 1024), (2, 384)):
        for first in range(0, 1024, step):
            wire.arrive(source, KEY, header, 4 * first, parts[source][first : first + step].tobytes())
    expected = (mine[:1024] + parts[1]) + parts[2]
    assert b"".join(payload for peer, slot, _, payload in wire.sent if (peer, slot) == (1, 1)) == expected.tobytes()


@pytest.mark.parametrize("early", [True, False], ids=["early", "late"])
def test_a_peer_in_another_call_fails_one_that_needs_nothing_of_that_peer(early: bool) -> None:
    wire, x = Wire(2), numbers(16 * 256)
    call = Call(Operation.BROADCAST, (TensorSpec(DType.FLOAT32, x.shape),), root=0, algorithm="direct")
    execution = start(wire, call, x)
    wire.full = not early
    if not early:
        assert not execution.advance()
        wire.full = False
    wire.arrive(1, KEY, Header(0, "barrier()", DType.UINT8, (0,), 0), 0, b"")
    with pytest.raises(CollectiveMismatchError):
        execution.advance()


def test_who_is_not_in_the_operation_yet_is_waited_for_and_named_with_its_last_one() -> None:
    wire, call = Wire(4), all_reduce(4096)
    execution = begin(wire, call, numbers(4096))
    assert execution.waiting_on() == [1, 2, 3]
    assert "rank 3 (no answer yet)" in execution.explain()
    for peer, standing, number, last in ((1, mailboxes.SAME, 1, call.signature), (2, mailboxes.ABSENT, 7, "barrier()")):
        wire.mailbox.probe_answered(peer, KEY, mailboxes.Standing(standing, last, number, last))
    wire.mailbox.probe_answered(3, KEY, mailboxes.Standing(mailboxes.ABSENT, "", 0, ""))
    assert execution.waiting_on() == [2, 3]
    assert execution.explain().endswith(
        "waits for rank 2 (not there yet: last entered barrier() #7), rank 3 (not there yet: has entered nothing of this group)"
    )
    wire.mailbox.probe_answered(3, KEY, mailboxes.Standing(mailboxes.ABSENT, "", 0, "barrier()"))
    assert "rank 3 (not there yet: last entered barrier() #0)" in execution.explain()
    for peer in (2, 3):
        wire.mailbox.probe_answered(peer, KEY, mailboxes.Standing(mailboxes.SAME, call.signature, 1, call.signature))
    assert execution.waiting_on() == [1, 2, 3]
    assert "rank 1 (is in it too)" in execution.explain()
    wire.lost_links[1] = "its stream broke"
    assert execution.explain().endswith("waits for rank 1 (its link was lost: its stream broke)")
    assert execution.waiting_on() == [1], "whatever it answered before it ended"
    wire.lost_links[1] = PEER_LEFT
    assert execution.explain().endswith("waits for rank 1 (it said goodbye)")


def test_a_rank_that_could_not_be_reached_is_told_with_its_address_and_the_hint_is_about_the_network() -> None:
    wire, call = Wire(3), all_reduce(4096)
    execution = begin(wire, call, numbers(4096))
    assert "firewalls" not in str(execution.timeout_error())
    wire.not_reached[2] = "not reached at 10.0.0.3:7000 in 14.9 s"
    assert execution.explain().endswith("waits for rank 1 (no answer yet), rank 2 (not reached at 10.0.0.3:7000 in 14.9 s)")
    assert "firewalls" in str(execution.timeout_error())
    for peer in (1, 2):
        wire.mailbox.probe_answered(peer, KEY, mailboxes.Standing(mailboxes.ABSENT, "", 0, ""))
    assert "not reached" not in execution.explain()


def test_who_has_not_granted_the_rest_of_a_message_is_waited_for_by_its_world_rank() -> None:
    wire, x = Wire(2), numbers(16 * 256)
    call = Call(Operation.REDUCE, (TensorSpec(DType.FLOAT32, x.shape),), ReduceOp.SUM, root=1, algorithm="direct")
    execution = start(wire, call, x, ranks=(0, 5))
    assert not execution.advance()
    assert execution.waiting_on() == [5]
    execution.probe()
    assert wire.probed == [5]


def test_nobody_is_asked_while_messages_still_come() -> None:
    wire = Wire(2)
    execution = begin(wire, all_reduce(2048), numbers(2048))
    wire.arrive(1, KEY, Header(0, all_reduce(2048).signature, DType.FLOAT32, (1024,), 4096), 0, bytes(CHUNK))
    execution.probe()
    assert wire.probed == []
    execution.probe()
    assert wire.probed == [1]


def test_of_a_rank_whose_data_is_under_way_it_is_told_how_much_and_who_is_not_there_is_waited_for() -> None:
    wire, call = Wire(4), all_reduce(4 * 2048)
    wire.not_reached[1] = "not reached at 10.0.0.2:7000 in 14.9 s"
    execution = begin(wire, call, numbers(4 * 2048))
    wire.arrive(1, KEY, Header(0, call.signature, DType.FLOAT32, (2048,), 8192), 0, bytes(CHUNK))
    wire.mailbox.probe_answered(2, KEY, mailboxes.Standing(mailboxes.ABSENT, "", 0, ""))
    wire.full = True
    wire.mailbox.granted(2, KEY, 0)
    assert execution.waiting_on() == [3]
    wire.arrive(3, KEY, Header(0, call.signature, DType.FLOAT32, (2048,), 8192), 0, bytes(2 * CHUNK))
    text, _, hint = str(execution.timeout_error()).partition("\n")
    assert text.endswith(
        "waits for rank 1 (1024 of 8192 bytes have come), rank 2 (4096 of 8192 bytes are on their way), "
        "rank 3 (2048 of 8192 bytes have come)"
    )
    assert "firewalls" not in hint


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_a_compressed_message_is_encoded_chunk_by_chunk_and_once_for_all_its_receivers(name, monkeypatch) -> None:
    chosen, encoded = codec(name), []
    honest = type(chosen).encode

    def encode(self: Any, values: np.ndarray) -> np.ndarray:
        encoded.append(values.size)
        return honest(self, values)

    monkeypatch.setattr(type(chosen), "encode", encode)
    wire, mine = Wire(3), numbers(3 * 600)
    execution = begin(wire, all_reduce(1800, name), mine)
    total = chosen.encoded_bytes(600)
    parts = {source: honest(chosen, numbers(600, source)) for source in (1, 2)}
    del encoded[:]
    for first, last in ((0, 256), (256, 512), (512, 600)):
        for source in (1, 2):
            offset = chosen.encoded_bytes(first)
            payload = honest(chosen, numbers(600, source)[first:last])
            wire.arrive(
                source,
                KEY,
                Header(0, all_reduce(1800, name).signature, DType.UINT8, (total,), total),
                offset,
                payload.tobytes(),
            )
        decoded = [
            mine[first:last],
            *(chosen.decode(honest(chosen, numbers(600, s)[first:last]), last - first) for s in (1, 2)),
        ]
        expected = honest(chosen, reduce(np.add, decoded)).tobytes()
        assert [(peer, payload) for peer, slot, where, payload in wire.sent if slot and where == offset] == [
            (1, expected),
            (2, expected),
        ]
    assert encoded == [256, 256, 88]
    assert sum(part.size for part in parts.values()) == 2 * total
    assert not execution.advance()


def test_a_compressed_chunk_that_finds_no_room_is_not_encoded_again(monkeypatch) -> None:
    encoded, honest = [], type(codec("bf16")).encode

    def encode(self: Any, values: np.ndarray) -> np.ndarray:
        encoded.append(values.size)
        return honest(self, values)

    monkeypatch.setattr(type(codec("bf16")), "encode", encode)
    wire = Wire(2)
    wire.full = True
    execution = begin(wire, all_reduce(1024, "bf16"), numbers(1024))
    assert not execution.advance()
    wire.full = False
    wire.rooms[0]()
    assert not execution.advance()
    assert len(wire.sent) == 2
    assert encoded == [256, 256]


def test_a_chunk_that_holds_half_a_number_is_an_error_of_the_operation() -> None:
    wire = Wire(2)
    execution = begin(wire, all_reduce(2048), numbers(2048))
    wire.arrive(1, KEY, Header(0, all_reduce(2048).signature, DType.FLOAT32, (1024,), 4096), 0, bytes(6))
    with pytest.raises(CodecError, match="no whole number of float32"):
        execution.advance()


@pytest.mark.parametrize("slot", [0, 1], ids=["part", "result"])
@pytest.mark.parametrize("count", [512, 2048])
def test_a_message_of_another_size_than_was_agreed_is_an_error_of_the_operation(slot: int, count: int) -> None:
    wire = Wire(2)
    execution = begin(wire, all_reduce(2048), numbers(2048))
    wire.arrive(1, KEY, Header(slot, all_reduce(2048).signature, DType.FLOAT32, (count,), 4 * count), 0, bytes(CHUNK))
    with pytest.raises(CodecError, match="which holds 1024 elements"):
        execution.advance()


def test_a_compressed_chunk_of_another_size_is_an_error_of_the_operation() -> None:
    wire, call = Wire(2), all_reduce(2048, "int8")
    total = codec("int8").encoded_bytes(1024)
    execution = begin(wire, call, numbers(2048))
    wire.arrive(1, KEY, Header(0, call.signature, DType.UINT8, (total,), total), 0, bytes(CHUNK))
    with pytest.raises(CodecError, match="256 values as int8 were due"):
        execution.advance()


def receive(wire: Wire, out: np.ndarray | None = None) -> RecvExecution:
    spec = None if out is None else TensorSpec(DType.FLOAT32, out.shape)
    execution = RecvExecution(wire, 0, 1, 7, out, spec, Guard(SYSTEM_CLOCK, Latch(), 20.0))
    execution.wake = lambda: None
    return execution


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_a_recv_takes_chunks_as_they_come_and_hands_on_what_it_took_when_it_gives_up(given: bool) -> None:
    wire, data = Wire(2), numbers(1536)
    key, header = Key(0, POINT_TO_POINT, 1), Header(7, "send", DType.FLOAT32, (1536,), 6 * CHUNK)

    def arrive(chunk: int) -> None:
        wire.arrive(1, key, header, CHUNK * chunk, data[256 * chunk : 256 * (chunk + 1)].tobytes())

    first = receive(wire, np.zeros(1536, np.float32) if given else None)
    assert not first.advance()
    for chunk in range(2):
        arrive(chunk)
    assert first.results[0][:512].tobytes() == data[:512].tobytes()
    assert wire.granted == [(1, 7)]
    first.finish()
    first.results[0][...] = -1
    arrive(2)
    second = receive(wire, np.zeros(1536, np.float32) if given else None)
    assert not second.advance()
    for chunk in range(3, 6):
        arrive(chunk)
    assert second.advance()
    second.finish()
    assert second.results[0].tobytes() == data.tobytes()
    assert wire.granted == [(1, 7)]


@pytest.mark.parametrize("out", [np.zeros(4, np.int32), np.zeros(5, np.float32)], ids=["dtype", "shape"])
def test_an_out_that_does_not_fit_leaves_the_message_to_the_next_recv(out: np.ndarray) -> None:
    wire, data = Wire(2), numbers(4)
    spec = TensorSpec(DType[out.dtype.name.upper()], out.shape)
    wrong = RecvExecution(wire, 0, 1, 7, out, spec, Guard(SYSTEM_CLOCK, Latch(), 20.0))
    wrong.wake = lambda: None
    wire.arrive(1, Key(0, POINT_TO_POINT, 1), Header(7, "send", DType.FLOAT32, (4,), 16), 0, data.tobytes())
    with pytest.raises(TensorMismatchError):
        wrong.advance()
    wrong.finish()
    right = receive(wire)
    assert right.advance()
    assert right.results[0].tobytes() == data.tobytes()


def test_what_an_operation_held_is_free_as_soon_as_it_is_over() -> None:
    """Without waiting for the garbage collector, which would let arrays and messages pile up."""

    def body(group: ProcessGroup) -> bool:
        x = numbers(1 << 19, group.rank)  # more than a small message
        seen: list[weakref.ref[Any]] = []
        backend = group._backend
        honest = backend.run

        def run(execution: Execution) -> Any:
            seen.append(weakref.ref(execution))
            return honest(execution)

        backend.run = run  # type: ignore[method-assign]
        group.all_reduce(x, algorithm="two_shot")
        if group.rank == 0:
            group.send(x, 1)
        else:
            group.recv(0)
        del backend.run
        group.barrier()
        return len(seen) == 2 and not any(reference() is not None for reference in seen)

    gc.collect()
    gc.disable()
    try:
        assert all(run_world(2, body))
    finally:
        gc.enable()


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot", "ring", "recursive_doubling", "tree"])
@pytest.mark.parametrize("seed", range(4))
def test_every_algorithm_in_many_chunks_gives_the_bits_it_gives_in_one(algorithm: str, seed: int, monkeypatch) -> None:
    size, count = 2 + seed, 3001
    inputs = [numbers(count, rank) for rank in range(size)]

    def body(group: ProcessGroup) -> tuple[bytes, bytes]:
        x = inputs[group.rank].copy()
        apart = group.all_reduce(x, op="mean", algorithm=algorithm)
        group.all_reduce(x, op="mean", algorithm=algorithm, out=x)
        return apart.tobytes(), x.tobytes()

    def run() -> list[tuple[bytes, bytes]]:
        faults = FaultPlan(delay_seconds=(0.0, 0.05))
        return run_world(size, body, faults=faults, seed=seed, clock=VirtualClock(seed))

    chunked = run()
    monkeypatch.undo()
    assert chunked == run()
    assert len({bits for pair in chunked for bits in pair}) == 1


def test_a_broadcast_of_unknown_size_is_passed_on_chunk_by_chunk() -> None:
    array = numbers(2500).reshape(50, 50)

    def body(group: ProcessGroup) -> bool:
        found = group.broadcast(array if group.rank == 1 else None, root=1)
        return found.shape == array.shape and found.tobytes() == array.tobytes()

    assert all(run_world(5, body, faults=FaultPlan(delay_seconds=(0.0, 0.05)), seed=3, clock=VirtualClock(3)))
