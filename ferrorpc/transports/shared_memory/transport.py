"""The transport between ranks of one host: small frames go over Unix sockets, larger ones through shared memory.

A small frame is a message on the socket. A larger one is copied into a slot of the sender's segment, and a parcel message on
the socket says where it is. The receiver's reader thread copies the frame out before it checks it, so that nothing that the
sender does afterwards can change what was checked, and sends a receipt, which frees the slot. Sockets keep the order, wake the
reader and end with their process. When a goodbye is read, everything that was sent before it is in the mailbox.

Cost: two copies of the payload, in two processes, and four system calls. The copies do not hold the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from ferrorpc.errors import CodecError, FerroError, GroupAbortedError, GroupClosedError, LimitExceededError
from ferrorpc.generation_errors import PEER_LEFT
from ferrorpc.guard import Latch
from ferrorpc.transports import control
from ferrorpc.transports.base import BROKEN_CLOSE_SECONDS, Transport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from ferrorpc.transports.shared_memory.segment import Bytes
from ferrorpc.transports.shared_memory.slots import SLOT_BYTES, Slots
from ferrorpc.types import Assignment
from ferrorpc.v1 import shared_memory_pb2
from ferrorpc.wire.frames import Frame, Header, Key, encode, frame_prefix, is_frame, scan
from ferrorpc.wire.parse import parse

INLINE_BYTES: Final = 12 << 10
"""Payloads of at most this size go over the socket: with the longest header they still fit a message there."""


class SharedMemoryTransport(Transport):
    """This rank's lanes to its host peers. Starts their reader thread at construction; `close` closes them.

    Args:
        on_link_lost: called with (peer, reason) at most once per peer, and never after `close` or after the latch has tripped.
    """

    def __init__(
        self,
        host_peers: HostPeers,
        assignment: Assignment,
        mailbox: Mailbox,
        latch: Latch,
        on_link_lost: Callable[[int, str], None],
    ) -> None:
        self.rank = assignment.rank
        self.size = assignment.size
        self.mailbox = mailbox
        self.peers = tuple(rank for rank in host_peers.ranks if rank != assignment.rank)
        """World ranks of the host peers."""
        self._host_peers = host_peers
        self._sockets = host_peers.reader.sockets
        self._latch = latch
        self._slots = {peer: Slots(host_peers.own, len(self.peers)) for peer in self.peers}
        self._sent = dict.fromkeys(self.peers, 0)
        self._lock = threading.Lock()
        self._ended: set[int] = set()
        self._failed: set[int] = set()
        self._closing = False
        host_peers.start(on_link_lost, self._on_message, self._end_peer)

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
        if not self._can_send_to(peer):
            return True
        if payload is None:
            return self._sockets[peer].try_send(encode(key, header, offset, b""), room)
        if payload.size <= INLINE_BYTES:
            sent = self._sockets[peer].try_send(encode(key, header, offset, payload.data), room)
        else:
            sent = self._send_parcel(peer, frame_prefix(key, header, offset, payload.size), payload, room)
        self._sent[peer] += payload.size if sent else 0
        return sent

    def _send_parcel(self, peer: int, start: bytes, payload: Bytes, room: Callable[[], None]) -> bool:
        slot = self._slots[peer].take(room)
        if slot is None:
            return peer in self._ended
        end = len(start) + payload.size
        slot.array[: len(start)] = np.frombuffer(start, np.uint8)
        slot.array[len(start) : end] = payload
        parcel = shared_memory_pb2.SharedMemoryParcel(offset=slot.offset, size_bytes=end)
        self._send_control(peer, shared_memory_pb2.SharedMemoryMessage(parcel=parcel))
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self._send_control(peer, shared_memory_pb2.SharedMemoryMessage(grant=control.grant_message(key, slot)))

    def probe(self, peer: int, key: Key, signature: str) -> None:
        has_left = self._host_peers.has_left(peer)
        if has_left and not self.mailbox.missed_before(peer, key):
            return
        if self._can_send_to(peer, needed=has_left):
            self._send_control(peer, shared_memory_pb2.SharedMemoryMessage(probe=control.probe_message(key, signature)))

    def busy_poll(self, peer: int, over: Callable[[], bool]) -> None:
        try:
            self._host_peers.reader.busy_poll(peer, over)
        except KeyboardInterrupt:
            # A message that was just read may not be in the mailbox, and its slot may never be freed.
            self.mailbox.report(GroupAbortedError(self.rank, f"KeyboardInterrupt while it read from rank {peer}"))
            raise

    def traffic(self) -> dict[int, tuple[str, int]]:
        return {peer: ("shared_memory", sent) for peer, sent in self._sent.items()}

    def lost(self) -> dict[int, str]:
        return self._host_peers.lost()

    def close(self, timeout: float) -> None:
        with self._lock:
            if self._closing:
                return
            self._closing = True
        for peer in self.peers:
            self._end_peer(peer)
        broken = self._latch.cause is not None
        ticket = 0 if broken else self._latch.watch(self._host_peers.reader.discard)
        self._host_peers.close(min(timeout, BROKEN_CLOSE_SECONDS) if broken else timeout)
        self._latch.forget(ticket)

    def _can_send_to(self, peer: int, needed: bool = True) -> bool:
        """Whether anything can be sent to a peer. One that has left is reported as lost where it is `needed`."""
        self._latch.check()
        if self._closing:
            raise GroupClosedError(f"rank {self.rank} has closed its links")
        if self._host_peers.has_left(peer):
            if needed:
                self._host_peers.report_lost(peer, PEER_LEFT)
            return False
        return peer not in self._ended

    def _send_control(self, peer: int, message: shared_memory_pb2.SharedMemoryMessage) -> None:
        if not self._sockets[peer].send(message.SerializeToString()):
            raise control.too_many_unread(peer)

    # -- events of the reader thread -----------------------------------------------------------------------------------

    def _on_message(self, source: int, data: bytes) -> None:
        """Handles a message. An invalid one, or one without memory, ends the generation; its sender's next ones are ignored."""
        if source in self._failed:
            return
        try:
            message = None if is_frame(data) else _read(data, source)
            if message is None or message.HasField("frame"):
                self._deliver(scan(data, source))
            else:
                self._handle(source, message)
        except FerroError as error:
            self._fail(source, error)
        except MemoryError as error:  # must not end the thread that reads from all host peers
            self._fail(source, LimitExceededError(f"rank {self.rank} has no memory for what rank {source} sent: {error}"))

    def _deliver(self, frame: Frame) -> None:
        if not self.mailbox.deliver(frame):
            self._failed.add(frame.source)

    def _fail(self, source: int, error: FerroError) -> None:
        self._failed.add(source)
        if not self._closing and self._latch.cause is None:
            self.mailbox.report(error)

    def _handle(self, source: int, message: shared_memory_pb2.SharedMemoryMessage) -> None:
        """Handles a message that is no frame. Ignores kinds that only a newer version knows."""
        kind = message.WhichOneof("body")
        if kind == "parcel":
            self._receive_parcel(source, message.parcel)
        elif kind == "receipt":
            self._slots[source].release(message.receipt.offset)
        elif kind == "grant":
            control.deliver_grant(self.mailbox, source, message.grant)
        elif kind == "probe":
            answer = control.probe_answer(self.mailbox, source, *control.read_probe(message.probe, source))
            self._send_control(source, shared_memory_pb2.SharedMemoryMessage(probe_answer=answer))
        elif kind == "probe_answer":
            control.deliver_probe_answer(self.mailbox, source, message.probe_answer)

    def _receive_parcel(self, source: int, parcel: shared_memory_pb2.SharedMemoryParcel) -> None:
        memory = self._host_peers.memory(source)
        end = parcel.offset + parcel.size_bytes
        if parcel.size_bytes > SLOT_BYTES or end > memory.size:
            raise CodecError(f"rank {source} says that a frame of {parcel.size_bytes} bytes lies at {parcel.offset}")
        copy = np.empty(parcel.size_bytes, np.uint8)
        copy[:] = memory[parcel.offset : end]
        self._deliver(scan(copy.data, source))
        receipt = shared_memory_pb2.SharedMemoryReceipt(offset=parcel.offset)
        self._send_control(source, shared_memory_pb2.SharedMemoryMessage(receipt=receipt))

    def _end_peer(self, peer: int) -> None:
        """Records that nothing more can be sent to this peer."""
        self._ended.add(peer)
        self._slots[peer].end()


def _read(data: bytes, source: int) -> shared_memory_pb2.SharedMemoryMessage:
    return parse(shared_memory_pb2.SharedMemoryMessage, data, f"{len(data)} bytes from rank {source} are no message of ours")
