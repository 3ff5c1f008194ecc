"""The transport between ranks of one host: small frames go over Unix sockets, larger ones through shared memory.

A small frame is a message on the socket. A larger one is copied into a slot of the sender's segment, and a parcel message on
the socket says where it is. The receiver's reader thread copies the frame out before it checks it, so that nothing that the
sender does afterwards can change what was checked, and sends a receipt, which frees the slot. Sockets keep the order, wake the
reader and end with their process. When a goodbye is read, everything that was sent before it is in the mailbox.

Cost: two copies of the payload, in two processes, and four system calls. The copies do not hold the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Final

import numpy as np

from ferrorpc.errors import CodecError, FerroError, GroupAbortedError, LimitExceededError
from ferrorpc.generation_errors import PEER_LEFT, is_interrupt, links_closed
from ferrorpc.transports import control
from ferrorpc.transports.base import Payload, Transport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.transports.shared_memory.host_peers import HostPeers
from ferrorpc.transports.shared_memory.link import Link
from ferrorpc.transports.shared_memory.segment import Bytes
from ferrorpc.transports.shared_memory.slots import SLOT_BYTES
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

    def __init__(self, host_peers: HostPeers, mailbox: Mailbox, on_link_lost: Callable[[int, str], None]) -> None:
        self.rank = host_peers.rank
        self.size = sum(map(len, host_peers.hosts))
        self.mailbox = mailbox
        self.peers = tuple(host_peers.links)
        """World ranks of the host peers."""
        self._host_peers = host_peers
        self._links = host_peers.links
        host_peers.start(on_link_lost, self._on_message)

    # -- what the collectives call -------------------------------------------------------------------------------------

    def send(self, peer: int, key: Key, header: Header, offset: int, payload: Payload, room: Callable[[], None]) -> bool:
        link = self._link_to(peer)
        if link is None:
            return True
        size_bytes = 0 if payload is None else payload.size
        if payload is None or size_bytes <= INLINE_BYTES:
            sent = link.socket.try_send(encode(key, header, offset, b"" if payload is None else payload.data), room)
        else:
            sent = self._send_parcel(link, frame_prefix(key, header, offset, size_bytes), payload, room)
        link.sent_bytes += size_bytes if sent else 0
        if self._host_peers.is_closing:  # it may have been dropped
            self._link_to(peer)
        return sent

    def _send_parcel(self, link: Link, start: bytes, payload: Bytes, room: Callable[[], None]) -> bool:
        slot = link.slots.take(room)
        if slot is None:
            return link.has_ended
        end = len(start) + payload.size
        slot.array[: len(start)] = np.frombuffer(start, np.uint8)
        slot.array[len(start) : end] = payload
        self._tell(link, parcel=shared_memory_pb2.SharedMemoryParcel(offset=slot.offset, size_bytes=end))
        return True

    def grant(self, peer: int, key: Key, slot: int) -> None:
        self._tell(self._links[peer], grant=control.grant_message(key, slot))

    def probe(self, peer: int, key: Key, signature: str) -> None:
        has_left = self._links[peer].has_left
        if has_left and not self.mailbox.still_needs(peer, key):
            return
        link = self._link_to(peer, needed=has_left)
        if link is not None:
            self._tell(link, probe=control.probe_message(key, signature))

    def busy_poll(self, peer: int, over: Callable[[], bool]) -> None:
        try:
            self._host_peers.reader.busy_poll(self._links[peer].socket, over)
        except BaseException as error:
            if is_interrupt(error):  # a message that was just read may not be in the mailbox, and its slot may never be freed
                cause = f"{type(error).__name__} while it read from rank {peer}"
                self.mailbox.report(GroupAbortedError(self.rank, cause))
            raise

    def traffic(self) -> dict[int, tuple[str, int]]:
        return {peer: ("shared_memory", link.sent_bytes) for peer, link in self._links.items()}

    def lost(self) -> dict[int, str]:
        return self._host_peers.lost()

    def close(self, timeout: float, unawaited: Container[int] = ()) -> None:
        self._host_peers.close(timeout, unawaited)

    def _link_to(self, peer: int, needed: bool = True) -> Link | None:
        """The link to a peer; None where nothing can be sent any more. One that has left is reported as lost where `needed`."""
        self._host_peers.latch.check()
        if self._host_peers.is_closing:
            raise links_closed(self.rank)
        link = self._links[peer]
        if link.has_left and needed:
            self._host_peers.report_lost(peer, PEER_LEFT)
        return None if link.has_left or link.has_ended else link

    def _tell(self, link: Link, **body: Any) -> None:
        """Sends a message that is no frame."""
        if not link.socket.send(shared_memory_pb2.SharedMemoryMessage(**body).SerializeToString()):
            raise control.too_many_unread(link.socket.peer)

    # -- events of the reader thread -----------------------------------------------------------------------------------

    def _on_message(self, source: int, data: bytes) -> None:
        """Handles a message. An invalid one, or one without memory, ends the generation; its sender's next ones are ignored."""
        link = self._links[source]
        if link.is_refused:
            return
        try:
            message = None if is_frame(data) else _read(data, source)
            if message is None or message.HasField("frame"):
                self._deliver(link, scan(data, source))
            else:
                self._handle(link, message)
        except FerroError as error:
            self._refuse(link, error)
        except MemoryError as error:  # must not end the thread that reads from all host peers
            self._refuse(link, LimitExceededError(f"rank {self.rank} has no memory for what rank {source} sent: {error}"))

    def _deliver(self, link: Link, frame: Frame) -> None:
        if not self.mailbox.deliver(frame):
            link.is_refused = True

    def _refuse(self, link: Link, error: FerroError) -> None:
        link.is_refused = True
        if not self._host_peers.is_over:
            self.mailbox.report(error)

    def _handle(self, link: Link, message: shared_memory_pb2.SharedMemoryMessage) -> None:
        """Handles a message that is no frame. Ignores kinds that only a newer version knows."""
        kind, source = message.WhichOneof("body"), link.socket.peer
        if kind == "parcel":
            self._receive_parcel(link, message.parcel)
        elif kind == "receipt":
            link.slots.release(message.receipt.offset)
        elif kind == "grant":
            control.deliver_grant(self.mailbox, source, message.grant)
        elif kind == "probe":
            key, signature = control.read_probe(message.probe, source)
            self._tell(link, probe_answer=control.probe_answer(self.mailbox, source, key, signature))
        elif kind == "probe_answer":
            control.deliver_probe_answer(self.mailbox, source, message.probe_answer)

    def _receive_parcel(self, link: Link, parcel: shared_memory_pb2.SharedMemoryParcel) -> None:
        memory, end = link.memory, parcel.offset + parcel.size_bytes
        if parcel.size_bytes > SLOT_BYTES or end > memory.size:
            raise CodecError(f"rank {link.socket.peer} says that a frame of {parcel.size_bytes} bytes lies at {parcel.offset}")
        copy = np.empty(parcel.size_bytes, np.uint8)
        copy[:] = memory[parcel.offset : end]
        self._deliver(link, scan(copy.data, link.socket.peer))
        self._tell(link, receipt=shared_memory_pb2.SharedMemoryReceipt(offset=parcel.offset))


def _read(data: bytes, source: int) -> shared_memory_pb2.SharedMemoryMessage:
    return parse(shared_memory_pb2.SharedMemoryMessage, data, f"{len(data)} bytes from rank {source} are no message of ours")
