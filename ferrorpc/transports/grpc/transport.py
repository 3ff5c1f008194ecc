"""The transport over gRPC: one stream per ordered pair of ranks, dialled by the sender at first use.

What a rank sends to a peer goes out on its lanes to that peer (lane.py). Grants and probe answers for what a peer sends go back
on that peer's first stream to this rank (incoming_stream.py). Answers about send and recv go out on the first lane, where there
is one, so that they come after the messages that were sent before. Where a rank has several lanes to a peer, each on a
connection of its own, the chunks of a message are distributed over them round-robin; messages of one chunk and probes take the
first lane.

A stream that ends without a goodbye is reported once per peer as a lost link; the coordinator decides what that means. A peer
that has said goodbye has left without a fault: its link counts as lost only when something is still sent to it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any, Final

from ferrorpc.config import LANES_MAX
from ferrorpc.errors import CodecError, FerroError, PermissionDeniedError
from ferrorpc.generation_errors import PEER_LEFT, links_closed
from ferrorpc.guard import Clock, Guard, Latch
from ferrorpc.transports import control
from ferrorpc.transports.base import BROKEN_CLOSE_SECONDS, CLOSE_SECONDS, Payload, Transport
from ferrorpc.transports.closing import wait_for_readers
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc.incoming_stream import GOODBYE, IncomingStream, refusal
from ferrorpc.transports.grpc.lane import Lane
from ferrorpc.transports.grpc.link import Link
from ferrorpc.transports.grpc.request_iterator import RequestIterator
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import Assignment
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Header, Key, encode
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION

DIAL_SECONDS: Final = 20.0

UNREACHED_SECONDS: Final = 1.0
"""A peer whose answer to the first dial takes longer is told as not reached. It takes milliseconds."""

ANSWER_SECONDS: Final = 0.5
"""How long the goodbyes to the senders of incoming streams may take, which come last."""


class GrpcTransport(Transport):
    """This rank's lanes in one generation. Registers with the process's server at construction.

    Args:
        on_link_lost: called with (peer, reason) at most once per peer, and never after `close` or after the latch has tripped.
        dial_seconds: how long a peer may be unreachable before its link counts as lost.
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
        self._links = [Link() for _ in range(assignment.size)]
        self._closing = self._closed = False
        """Nothing is sent any more; close() was called."""
        self._deaf = False
        """Senders are told goodbye: only once peers have read what was sent, or they would not wait for it any longer."""
        server.register(self, partial(self.close, CLOSE_SECONDS, latch.unhealthy))

    # -- what the collectives call -------------------------------------------------------------------------------------

    def send(self, peer: int, key: Key, header: Header, offset: int, payload: Payload, room: Callable[[], None]) -> bool:
        lane = self._lane_to(peer, offset // CHUNK_BYTES % self._server.lanes)
        if lane is None:
            return True
        size_bytes = 0 if payload is None else payload.size
        if not lane.queue.reserve(size_bytes, room):
            return False
        lane.sent_frames = True
        lane.queue.put_frame(encode(key, header, offset, b"" if payload is None else payload.data), size_bytes)
        if self._closing:  # it may have been dropped
            self._lane_to(peer)
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self._answer(peer, transport_pb2.ControlMessage(grant=control.grant_message(key, slot)))

    def probe(self, peer: int, key: Key, signature: str) -> None:
        link = self._links[peer]
        has_left = link.has_left
        if has_left and (self._may_still_arrive(link) or not self.mailbox.still_needs(peer, key, link.cut is None)):
            return
        lane = self._lane_to(peer, needed=has_left)
        if lane is not None:
            lane.queue.put(transport_pb2.DataMessage(probe=control.probe_message(key, signature)).SerializeToString())

    def traffic(self) -> dict[int, tuple[str, int]]:
        with self._lock:
            return {peer: ("grpc", link.sent_bytes()) for peer, link in enumerate(self._links) if link.lanes}

    def unreached(self) -> dict[int, str]:
        now, busy, waited = self._clock.now(), self._latch.unhealthy, dict[int, float]()
        with self._lock:
            for peer, link in enumerate(self._links):
                if not (link.dialled_at is None or link.is_reached or peer in busy):
                    waited[peer] = now - link.dialled_at
        return {
            peer: f"not reached at {self.assignment.peers[peer].address} in {seconds:.1f} s"
            for peer, seconds in waited.items()
            if seconds >= UNREACHED_SECONDS
        }

    def lost(self) -> dict[int, str]:
        with self._lock:
            return {peer: link.loss for peer, link in enumerate(self._links) if link.loss is not None}

    def finish(self) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for lane in self._lanes():
            lane.finish(len(self._links[lane.peer].lanes), discard=self._latch.cause is not None)

    def _lanes(self) -> list[Lane]:
        """Those that were opened. None is opened any more once this is closing."""
        with self._lock:
            return [lane for link in self._links for lane in link.lanes.values()]

    def close(self, timeout: float, unawaited: Container[int] = ()) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.finish()
        lanes = self._lanes()
        broken = self._latch.cause is not None
        deadline = self._clock.now() + (min(timeout, BROKEN_CLOSE_SECONDS) if broken else timeout)
        if not broken:
            self._wait_for_readers(lanes, timeout - min(ANSWER_SECONDS, timeout / 2), unawaited)
            deadline = min(deadline, self._clock.now() + ANSWER_SECONDS)
        with self._lock:
            self._deaf = True
            incoming = [stream for link in self._links for stream in link.incoming.values()]
        for stream in incoming:
            stream.finish()
        ends: list[Lane | IncomingStream] = [*lanes, *incoming]
        for end in ends:
            end.wait(max(0.0, deadline - self._clock.now()))
        for lane in lanes:
            lane.cancel()
        for stream in incoming:
            stream.end()

    def _wait_for_readers(self, lanes: list[Lane], seconds: float, unawaited: Container[int]) -> None:
        """Waits until the peers have read all that was sent to them. The end of the generation ends that."""

        def give_up() -> None:
            for lane in lanes:
                lane.cancel()

        def unread() -> dict[int, Callable[[float], object]]:
            return {lane.peer: lane.wait for lane in lanes if not lane.ended}

        ticket = self._latch.watch(give_up)
        wait_for_readers(self.rank, unread, unawaited, Guard(self._clock, self._latch, seconds))
        self._latch.forget(ticket)

    def abandon_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._closing = self._closed = True

    # -- what the server calls -----------------------------------------------------------------------------------------

    def serve(self, source: int, lane: int, requests: RequestIterator, context: Any) -> Iterator[bytes]:
        """Runs stream `lane` from `source` until it ends; the caller's thread writes what goes back."""
        stream, incoming = IncomingStream(source, requests, self), self._links[source].incoming
        with self._lock:
            before = incoming.get(lane)
            refused = GOODBYE if self._deaf else self._refuse(source, lane, before)
            if refused is None:
                incoming[lane] = stream
        if refused is not None:
            yield refused
            return
        if before is not None:
            before.drop()
        if not context.add_callback(stream.end):
            stream.end()
        self._clock.start(stream.read, f"ferrorpc-read-{lane}-from-{source}")
        yield transport_pb2.ControlMessage(
            opened=transport_pb2.Opened(generation=self.assignment.generation)
        ).SerializeToString()
        yield from stream.queue.messages()

    def _refuse(self, source: int, lane: int, before: IncomingStream | None) -> bytes | None:
        """The refusal of a second stream with the number of the one `before`; None to accept it.

        A peer may dial again as long as it has sent nothing but its Open: it cannot know whether that arrived.
        """
        if before is not None and before.received:
            what = "twice in one generation"
        elif lane >= LANES_MAX:
            what = f"as stream {lane} of a pair, which may have {LANES_MAX}"
        else:
            return None
        hint = f"look whether somebody else speaks for rank {source}, with its certificate or token"
        return refusal(PermissionDeniedError(f"rank {source} dialled rank {self.rank} {what}", hint=hint))

    # -- events of lanes and streams -----------------------------------------------------------------------------------

    def lane_answered(self, lane: Lane, message: transport_pb2.ControlMessage) -> None:
        kind, peer = message.WhichOneof("body"), lane.peer
        try:
            if kind == "grant":
                control.deliver_grant(self.mailbox, peer, message.grant)
            elif kind == "probe_answer":
                control.deliver_probe_answer(self.mailbox, peer, message.probe_answer)
        except CodecError as error:
            self._fail(peer, error)
        if kind == "refused":
            self._fail(peer, restore(message.refused))
        elif kind == "opened":
            lane.opened = True
        elif kind == "goodbye":
            self._links[peer].leave(self._clock.now())
            if lane.sent_frames and not lane.opened:
                # The peer had left before this lane reached it, so nothing that was sent on it has arrived.
                self._report_left(peer)

    def lane_ended(self, lane: Lane, reason: str) -> None:
        if not reason or self._links[lane.peer].has_left:
            return
        if lane.fault is not None:
            self._fail(lane.peer, lane.fault)
        else:
            self._report_lost(lane.peer, reason)

    def frame_arrived(self, frame: Frame) -> None:
        if not self.mailbox.deliver(frame):
            self._mark_lost(frame.source, "what it sent was refused")

    def probe_arrived(self, source: int, key: Key, signature: str) -> None:
        answer = control.probe_answer(self.mailbox, source, key, signature)
        lane = self._links[source].lanes.get(0)
        if key.stream != POINT_TO_POINT or lane is None:
            self._answer(source, transport_pb2.ControlMessage(probe_answer=answer))
        elif not lane.queue.put(transport_pb2.DataMessage(probe_answer=answer).SerializeToString()):
            self._fail(source, control.too_many_unread(source))

    def probe_answered(self, source: int, answer: transport_pb2.ProbeAnswer) -> None:
        control.deliver_probe_answer(self.mailbox, source, answer)

    def incoming_ended(self, source: int, streams: int, reason: str) -> None:
        link = self._links[source]
        with self._lock:
            link.ended_streams += 1
            if streams:
                link.peer_streams = streams
                link.leave(self._clock.now())
            else:
                link.cut = reason
        if not link.has_left:
            self._report_lost(source, reason)

    def incoming_unused(self, stream: IncomingStream, reason: str) -> None:
        link = self._links[stream.source]
        with self._lock:
            link.cut = reason
            for number in [number for number, found in link.incoming.items() if found is stream]:
                del link.incoming[number]

    def incoming_failed(self, source: int, error: FerroError) -> None:
        self._fail(source, error)

    # -- links ---------------------------------------------------------------------------------------------------------

    def _lane_to(self, peer: int, number: int = 0, needed: bool = True) -> Lane | None:
        """The lane to a peer, dialled at first use; None where nothing can be sent any more.

        gRPC serves a lane with threads, which an interpreter that exits does not start (Python 3.12). A script may end right
        after its last operation, and what that sent must arrive. So the lane has its threads before anything is sent.

        Args:
            needed: whether a peer that has left is then reported as lost.
        """
        self._latch.check()
        link = self._links[peer]
        lane = link.lanes.get(number)
        if lane is None or link.loss is not None or link.has_left or self._closing:
            lane = self._new_lane_to(peer, number, needed)
        if lane is not None:
            lane.wait_until_started()  # without the lock, and once all know of the lane: an interrupt here loses nothing
        return lane

    def _new_lane_to(self, peer: int, number: int, needed: bool) -> Lane | None:
        link = self._links[peer]
        if needed and link.has_left:
            self._report_left(peer)
        opening = b""
        if not (self._closing or link.loss is not None or link.has_left or number in link.lanes):
            opening = self._open_message(peer, number)  # without the lock, which beats take: the token's file may be slow
        with self._lock:
            if self._closing:
                raise links_closed(self.rank)
            if link.loss is not None or link.has_left:
                return None
            lane = link.lanes.get(number)
            if lane is None:
                address, job = self.assignment.peers[peer].address, self.assignment.job
                dial, diagnose = partial(self._server.dial, address, job), partial(self._server.diagnose, address, job)
                lane = Lane(peer, number, address, dial, opening, diagnose, self, self._clock, self._dial_seconds)
                link.lanes[number] = lane
                if link.dialled_at is None:
                    link.dialled_at = self._clock.now()
            return lane

    def _may_still_arrive(self, link: Link) -> bool:
        """Whether messages of a peer that said goodbye can still arrive: its goodbye on this rank's lane may overtake them.

        Once the peer's own streams have ended as well, all its messages are in the mailbox.
        """
        with self._lock:
            return not link.all_ended and link.may_bring_more(self._clock.now())

    def _open_message(self, peer: int, lane: int) -> bytes:
        token, before = self._server.token.both()
        opening = transport_pb2.Open(
            protocol_version=DATA_PROTOCOL_VERSION,
            job=self.assignment.job,
            cluster_id=self.assignment.cluster_id,
            generation=self.assignment.generation,
            source_rank=self.rank,
            target_rank=peer,
            token=token,
            token_before=before,
            lane=lane,
        )
        return transport_pb2.DataMessage(open=opening).SerializeToString()

    def _answer(self, peer: int, message: transport_pb2.ControlMessage) -> None:
        """Sends back on the peer's first stream. A peer that has opened none expects nothing."""
        stream = self._links[peer].incoming.get(0)
        if stream is not None and not stream.queue.put(message.SerializeToString()):
            self._fail(peer, control.too_many_unread(peer))

    def _report_left(self, peer: int) -> None:
        """Reports the link to a peer that said goodbye, and is still needed."""
        self._report_lost(peer, self._links[peer].cut or PEER_LEFT)

    def _report_lost(self, peer: int, reason: str) -> None:
        if self._mark_lost(peer, reason):
            self._on_link_lost(peer, reason)

    def _fail(self, peer: int, error: FerroError) -> None:
        """Ends the generation with an error of this link. The link's end is then not reported as well."""
        if self._mark_lost(peer, error.message):
            self.mailbox.report(error)

    def _mark_lost(self, peer: int, reason: str) -> bool:
        """Whether the loss of this peer is to be reported: only the first one, in a generation that goes on."""
        link = self._links[peer]
        with self._lock:
            if self._closing or self._latch.cause is not None or link.loss is not None:
                return False
            link.loss = reason
            return True
