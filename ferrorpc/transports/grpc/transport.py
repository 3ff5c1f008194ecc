"""The transport over gRPC: one stream per ordered pair of ranks, dialled by the sender at first use.

Where a rank has several lanes to a peer, each on a connection of its own, the chunks of a message are dealt out to them in
turn; whatever fits one chunk, and every question, takes the first. What a rank sends to a peer goes out on its lanes to it
(lane.py); grants and answers for what a peer sends go back on that peer's first inlet (inlet.py). A stream that ends
without a goodbye is a suspicion, told once per peer; who is right is decided elsewhere. A peer that has said goodbye is gone
without fault: only what is still sent to it finds its link lost.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.config import LANES_MAX
from ferrorpc.errors import CodecError, FerroError, GroupClosedError, PermissionDeniedError
from ferrorpc.guard import Clock, Latch
from ferrorpc.transports import control
from ferrorpc.transports.base import Transport
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc.inlet import GOODBYE, Inlet, refusal
from ferrorpc.transports.grpc.lane import Lane
from ferrorpc.transports.grpc.requests import Requests
from ferrorpc.transports.grpc.server import PROTOCOL_VERSION, WorkerServer
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import Assignment
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.details import restore
from ferrorpc.wire.frames import Frame, Header, Key, encode

DIAL_SECONDS: Final = 20.0

BROKEN_SECONDS: Final = 0.2
"""How long the goodbyes of a broken generation may take: nothing is left to be flushed, and some peer may be gone."""

OVERTAKEN_SECONDS: Final = 2.0
"""How long after a peer's goodbye its own stream may still come up: longer than its close may take."""

_GONE: Final = "rank {} has left"


class GrpcTransport(Transport):
    """This rank's lanes of one generation, over the process's server. Registers with it at construction.

    Args:
        on_link_lost: told (peer, reason) at most once per peer, and never after `close` or after the latch has tripped.
        dial_seconds: how long a peer may be out of reach before its link counts as lost.
    """

    def __init__(
        self,
        server: WorkerServer,
        assignment: Assignment,
        mailbox: Mailbox,
        latch: Latch,
        clock: Clock,
        on_link_lost: Callable[[int, str], None],
        *,
        dial_seconds: float = DIAL_SECONDS,
    ) -> None:
        self.rank = assignment.rank
        self.size = assignment.size
        self.mailbox = mailbox
        self.assignment = assignment
        self._server = server
        self._latch = latch
        self._clock = clock
        self._on_link_lost = on_link_lost
        self._dial_seconds = dial_seconds
        self._lock = threading.Lock()
        self._lanes: dict[tuple[int, int], Lane] = {}
        """By (peer, number)."""
        self._inlets: dict[tuple[int, int], Inlet] = {}
        """By (source, number)."""
        self._left: dict[int, float] = {}
        self._streams: dict[int, int] = {}
        """How many streams a peer that said goodbye had opened to this rank."""
        self._ended: Counter[int] = Counter()
        """How many of a peer's streams are over."""
        self._lost: set[int] = set()
        self._closing = False
        server.register(self)

    # -- what the collectives call -------------------------------------------------------------------------------------

    def send(
        self,
        peer: int,
        key: Key,
        header: Header,
        offset: int,
        payload: np.ndarray[Any, Any] | None,
        room: Callable[[], None],
    ) -> bool:
        lane = self._lane_to(peer, offset // CHUNK_BYTES % self._server.lanes)
        if lane is None:
            return True
        size_bytes = 0 if payload is None else payload.size
        if not lane.outbox.reserve(size_bytes, room):
            return False
        lane.carried = True
        lane.outbox.put_frame(encode(key, header, offset, b"" if payload is None else payload.data), size_bytes)
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self._answer(peer, transport_pb2.ControlMessage(grant=control.grant_of(key, slot)))

    def probe(self, peer: int, key: Key, signature: str) -> None:
        has_left = peer in self._left
        if has_left and self._may_still_arrive(peer, key):
            return
        lane = self._lane_to(peer, needed=has_left)
        if lane is not None:
            lane.outbox.put(transport_pb2.DataMessage(probe=control.probe_of(key, signature)).SerializeToString())

    def traffic(self) -> dict[int, tuple[str, int]]:
        carried_bytes: Counter[int] = Counter()
        with self._lock:
            for (peer, _), lane in self._lanes.items():
                carried_bytes[peer] += lane.outbox.carried_bytes
        return {peer: ("grpc", size_bytes) for peer, size_bytes in carried_bytes.items()}

    def close(self, timeout: float) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
            lanes, inlets = list(self._lanes.values()), list(self._inlets.values())
        broken = self._latch.cause is not None
        deadline = self._clock.now() + (min(timeout, BROKEN_SECONDS) if broken else timeout)
        streams = Counter(lane.peer for lane in lanes)
        for lane in lanes:
            lane.finish(streams[lane.peer], discard=broken)
        for inlet in inlets:
            inlet.finish()
        ends: list[Lane | Inlet] = [*lanes, *inlets]
        for end in ends:
            end.wait(max(0.0, deadline - self._clock.now()))
        for lane in lanes:
            lane.cancel()
        for inlet in inlets:
            inlet.hang_up()

    def abandon_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent's may have held it
        self._closing = True

    # -- what the server calls -----------------------------------------------------------------------------------------

    def serve(self, source: int, lane: int, requests: Requests, context: Any) -> Iterator[bytes]:
        """Runs stream `lane` from `source` until it ends; the caller's thread writes what goes back."""
        inlet = Inlet(source, requests, self)
        with self._lock:
            refused = GOODBYE if self._closing else self._refuse(source, lane)
            if refused is None:
                before = self._inlets.get((source, lane))
                self._inlets[source, lane] = inlet
        if refused is not None:
            yield refused
            return
        if before is not None:
            before.give_way()
        if not context.add_callback(inlet.hang_up):
            inlet.hang_up()
        self._clock.start(inlet.read, f"ferrorpc-read-{lane}-from-{source}")
        yield transport_pb2.ControlMessage(
            opened=transport_pb2.Opened(generation=self.assignment.generation)
        ).SerializeToString()
        yield from inlet.answers()

    def _refuse(self, source: int, lane: int) -> bytes | None:
        """Who dials may repeat that until it has sent more than its Open: before, it cannot know whether that arrived."""
        before = self._inlets.get((source, lane))
        if before is not None and before.heard:
            what = "twice in one generation"
        elif lane >= LANES_MAX:
            what = f"as stream {lane} of a pair, which may have {LANES_MAX}"
        else:
            return None
        hint = f"look whether somebody else speaks for rank {source}, with its certificate or token"
        return refusal(PermissionDeniedError(f"rank {source} dialled rank {self.rank} {what}", hint=hint))

    # -- what lanes and inlets tell ------------------------------------------------------------------------------------

    def lane_answered(self, lane: Lane, message: transport_pb2.ControlMessage) -> None:
        kind, peer = message.WhichOneof("body"), lane.peer
        try:
            if kind == "grant":
                control.take_grant(self.mailbox, peer, message.grant)
            elif kind == "probe_answer":
                control.take_answer(self.mailbox, peer, message.probe_answer)
        except CodecError as error:
            self._fail(peer, error)
        if kind == "refused":
            self._fail(peer, restore(message.refused))
        elif kind == "opened":
            lane.opened = True
        elif kind == "goodbye":
            self._left.setdefault(peer, self._clock.now())
            if lane.carried and not lane.opened:
                # It had left before this lane reached it, so what was sent on it has arrived nowhere.
                self._lose(peer, _GONE.format(peer))

    def lane_ended(self, lane: Lane, reason: str) -> None:
        if not reason or lane.peer in self._left:
            return
        if lane.fault is not None:
            self._fail(lane.peer, lane.fault)
        else:
            self._lose(lane.peer, reason)

    def frame_arrived(self, frame: Frame) -> None:
        if not self.mailbox.deliver(frame):
            self._first_to_blame(frame.source)

    def probe_arrived(self, source: int, key: Key, signature: str) -> None:
        answer = control.answer_of(self.mailbox, key, signature)
        self._answer(source, transport_pb2.ControlMessage(probe_answer=answer))

    def inlet_ended(self, source: int, streams: int, reason: str) -> None:
        with self._lock:
            self._ended[source] += 1
        if streams:
            self._streams[source] = streams
            self._left.setdefault(source, self._clock.now())
        elif source not in self._left:
            self._lose(source, reason)

    def inlet_unused(self, inlet: Inlet) -> None:
        with self._lock:
            for place in [place for place, found in self._inlets.items() if found is inlet]:
                del self._inlets[place]

    def inlet_failed(self, source: int, error: FerroError) -> None:
        self._fail(source, error)

    # -- links ---------------------------------------------------------------------------------------------------------

    def _lane_to(self, peer: int, number: int = 0, needed: bool = True) -> Lane | None:
        """A lane to a peer, dialled at first use; None where nothing can be sent any more. Where it is needed, that has been
        told."""
        self._latch.check()
        lane = self._lanes.get((peer, number))
        if self._closing or peer in self._left or peer in self._lost or lane is None:
            lane = self._new_lane_to(peer, number, needed)
        return lane

    def _new_lane_to(self, peer: int, number: int, needed: bool) -> Lane | None:
        if needed and peer in self._left:
            self._lose(peer, _GONE.format(peer))
        with self._lock:
            if self._closing:
                raise GroupClosedError(f"rank {self.rank} has closed its streams")
            if peer in self._lost or peer in self._left:
                return None
            lane = self._lanes.get((peer, number))
            if lane is None:
                address, job, opening = self.assignment.peers[peer].address, self.assignment.job, self._opening(peer, number)
                channel, diagnose = self._server.dial(address, job), partial(self._server.diagnose, address, job)
                lane = Lane(peer, number, address, channel, opening, diagnose, self, self._clock, self._dial_seconds)
                self._lanes[peer, number] = lane
            return lane

    def _may_still_arrive(self, peer: int, key: Key) -> bool:
        """Whether the part of a peer that said goodbye can be on its way: a goodbye on this rank's lane may overtake it.

        Once the peer's own streams have ended as well, all of it lies in the mailbox.
        """
        with self._lock:
            ended, begun = self._ended[peer], sum(source == peer for source, _ in self._inlets)
        if ended >= self._streams.get(peer, 1):
            return not self.mailbox.asks_again(peer, key)
        return begun > ended or self._clock.now() - self._left[peer] < OVERTAKEN_SECONDS

    def _opening(self, peer: int, lane: int) -> bytes:
        opening = transport_pb2.Open(
            protocol_version=PROTOCOL_VERSION,
            job=self.assignment.job,
            cluster_id=self.assignment.cluster_id,
            generation=self.assignment.generation,
            source_rank=self.rank,
            target_rank=peer,
            token=self._server.token.current(),
            lane=lane,
        )
        return transport_pb2.DataMessage(open=opening).SerializeToString()

    def _answer(self, peer: int, message: transport_pb2.ControlMessage) -> None:
        """Sends back on the peer's inlet; a peer without one has nothing to be told."""
        inlet = self._inlets.get((peer, 0))
        if inlet is not None and not inlet.outbox.put(message.SerializeToString()):
            self._fail(peer, control.unread(peer))

    def _lose(self, peer: int, reason: str) -> None:
        if self._first_to_blame(peer):
            self._on_link_lost(peer, reason)

    def _fail(self, peer: int, error: FerroError) -> None:
        """The link is over because of an error that ends the generation; its end is no further news."""
        if self._first_to_blame(peer):
            self.mailbox.failed(error)

    def _first_to_blame(self, peer: int) -> bool:
        with self._lock:
            if self._closing or self._latch.cause is not None or peer in self._lost:
                return False
            self._lost.add(peer)
            return True
