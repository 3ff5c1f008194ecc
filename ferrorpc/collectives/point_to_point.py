"""send and recv as executions, over a transport with a mailbox.

Messages to one rank with one tag are received in the order of the send calls. To keep that order, a send waits in a queue until
the first chunk of the previous one is on its lane. So neither side keeps any state for a tag without messages in flight, and a
job may use a new tag for each message.
"""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections import deque
from typing import Any, Final

import numpy as np

from ferrorpc.collectives.dependencies import UNBOUNDED
from ferrorpc.collectives.device_transfers import DeviceTransfers, transfers_for
from ferrorpc.collectives.event_driven import EventDrivenExecution
from ferrorpc.collectives.execution import hint_about
from ferrorpc.collectives.outgoing_message import OutgoingMessage
from ferrorpc.errors import CollectiveTimeoutError, FerroError, GroupClosedError, PeerLostError, TensorMismatchError
from ferrorpc.generation_errors import describe_lost_link
from ferrorpc.guard import Guard
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import FINISHED, Box
from ferrorpc.transports.point_to_point import ANY_NUMBER, Ending, Message, PostedReceive
from ferrorpc.types import TensorSpec
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Header, Key

Array = np.ndarray[Any, Any]

SEND: Final = "send"
"""The signature of every message of a send."""


def label_of_send(spec: TensorSpec, peer: int, tag: int) -> str:
    """The text for a send to a world rank."""
    return f"send({spec} to rank {peer}, tag={tag})"


def label_of_recv(peer: int, tag: int) -> str:
    """The text for a recv from a world rank."""
    return f"recv(from rank {peer}, tag={tag})"


class SendQueues:
    """The sends of one group that have not begun, in a queue for each (target, tag)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[tuple[int, int], deque[SendExecution]] = {}

    def join(self, send: SendExecution) -> int:
        """Adds a send. Returns the number of its message, larger than those before it."""
        with self._lock:
            self._waiting.setdefault(send.destination, deque()).append(send)
            return next(self._numbers)

    def number_at_once(self, peer: int, tag: int) -> int:
        """The number of a message that is sent before its caller returns; 0 where others to that peer and tag wait."""
        with self._lock:
            return 0 if (peer, tag) in self._waiting else next(self._numbers)

    def is_first(self, send: SendExecution) -> bool:
        """Whether a send may begin."""
        return self._waiting[send.destination][0] is send

    def leave(self, send: SendExecution) -> None:
        """Removes a send that has begun, or never will: the next one in its queue may begin."""
        with self._lock:
            queue = self._waiting[send.destination]
            queue.remove(send)
            following = queue[0] if queue else None
            if following is None:
                del self._waiting[send.destination]
        if following is not None and hasattr(following, "wake"):  # without a driver, its first `advance` looks at everything
            following.notify()


class _PointToPoint(EventDrivenExecution):
    """What sends and recvs have in common. `peer` is a world rank."""

    def __init__(
        self, transport: Transport, group: int, peer: int, tag: int, guard: Guard, transfers: DeviceTransfers | None
    ) -> None:
        super().__init__(guard, transfers)
        self._transport = transport
        self._group = group
        self._peer = peer
        self._tag = tag

    def waiting_on(self) -> list[int]:
        return [] if self.waits_for_own_gpu else [self._peer]

    @abstractmethod
    def _progress(self) -> str:
        """How much of the message has come or gone, as text; "" for nothing."""

    def _with_reach(self, text: str) -> str:
        """An explanation that ends with what the peer is to do, how much of that is done, or else whether the peer could be
        reached at all, and whether it still can be."""
        progress = self._progress()
        if progress:
            text = f"{text}: {progress}"
        lost, unreached = self._transport.lost().get(self._peer), self._transport.unreached().get(self._peer)
        if lost is not None:
            return f"{text}; {describe_lost_link(lost)}"
        return text if progress or unreached is None else f"{text}; rank {self._peer} was {unreached}"

    def _timed_out(self, hint: str) -> CollectiveTimeoutError:
        """The error of its deadline. The hint is for a peer that is there."""
        ranks = self.waiting_on()
        text = f"after {self.guard.seconds:g} s, {self.explain()}"
        if not ranks:
            return CollectiveTimeoutError(ranks, text, hint="look at what its stream on the GPU waits for")
        under_way = ranks if self._progress() else ()
        return CollectiveTimeoutError(ranks, text, hint=hint_about(ranks, self._transport, hint, under_way))


class SendExecution(_PointToPoint):
    """One send. `peer` is a world rank; `data` may be on a device."""

    def __init__(
        self,
        transport: Transport,
        group: int,
        queues: SendQueues,
        data: Any,
        spec: TensorSpec,
        peer: int,
        tag: int,
        guard: Guard,
    ) -> None:
        super().__init__(transport, group, peer, tag, guard, transfers_for([data], None, 0))
        self.destination = peer, tag
        """Peer and tag, which have one queue."""
        self._queues: SendQueues | None = queues
        """None once it has begun."""
        self._box: Box | None = None
        here = data if self.transfers is None else self.transfers.inputs[0]
        self._outgoing = OutgoingMessage(peer, Header(tag, SEND, spec.dtype, spec.shape, here.nbytes), here.reshape(-1))
        self._spec = spec
        self._key = Key(group, POINT_TO_POINT, queues.join(self))

    @property
    def label(self) -> str:
        return label_of_send(self._spec, self._peer, self._tag)

    def step(self) -> bool:
        box, outgoing = self._box, self._outgoing
        if box is None:
            box = self._box = Box()
            box.signature, box.wake = SEND, self.notify
            self._transport.mailbox.start_sending(self._peer, self._key, box)
        if self._queues is not None and not self._queues.is_first(self):
            return False
        # Room wakes the driver, which has nothing else to do: the lane's writer, which reports it, should write.
        limit = UNBOUNDED if self.transfers is None else self.transfers.downloaded(0)
        while outgoing.send(self._transport, self._key, box, limit, self.wake):
            self._leave_queue()
            if outgoing.done == outgoing.count:
                return True
        answer = box.answers.get(self._peer)
        if answer is not None and answer.standing == FINISHED:
            raise GroupClosedError(
                f"{self.label} has nobody to receive it: rank {self._peer} has closed this subgroup",
                hint="let that rank receive before it calls close() on the subgroup",
                rank=self._peer,
            )
        return False

    def _leave_queue(self) -> None:
        queues, self._queues = self._queues, None
        if queues is not None:
            self._transport.mailbox.began_sending(self._key)
            queues.leave(self)

    def probe(self) -> None:
        """Asks only whether the receiver has closed the group: one that has not called recv yet is not in any operation."""
        self._transport.probe(self._peer, self._key, SEND)

    def _progress(self) -> str:
        return "" if self._box is None else self._outgoing.progress(self._box)

    def explain(self) -> str:
        if self.waits_for_own_gpu:
            return f"{self.label} waits for this rank's own GPU"
        who = f"rank {self._peer} to receive from rank {self._transport.rank} with tag {self._tag}"
        return self._with_reach(f"{self.label} waits for {who}")

    def timeout_error(self) -> FerroError:
        return self._timed_out(
            "where both ranks send first, send with async_op=True, receive, then wait; or pass a larger timeout="
        )

    def leave(self) -> None:
        self._leave_queue()
        self._transport.mailbox.stop_sending(self._key)
        self._box = None


class RecvExecution(_PointToPoint):
    """One recv. `peer` is a world rank; `out` may be on a device.

    A timeout, or an `out` that does not fit, leaves the message for the next recv. It takes its place in the queue of recvs in
    its first step, within its driver, which can withdraw it wherever it is interrupted.
    """

    timeout_breaks = False

    _withdrawal: FerroError
    """What it fails with once it is withdrawn."""

    def __init__(
        self, transport: Transport, group: int, peer: int, tag: int, out: Any, spec: TensorSpec | None, guard: Guard
    ) -> None:
        super().__init__(transport, group, peer, tag, guard, None if out is None else transfers_for([], [out], 1))
        self._out: Array | None = out if self.transfers is None else None
        self._spec = spec
        self._taken = np.empty(0, np.uint8)
        """The bytes of the result, of which the first `_received` are here."""
        self._received = -1
        self._post: PostedReceive | None = PostedReceive((group, peer, tag), self.notify)
        """Its place in the queue; None once it is over: each refers to the other."""
        self._is_posted = False
        self._mine: tuple[int, Message] | None = None
        """The message that it has taken, with its number."""

    @property
    def label(self) -> str:
        if self.awaited is not None:
            return f"recv({self.awaited} of rank {self._peer})"
        return label_of_recv(self._peer, self._tag)

    def step(self) -> bool:
        post = self._post
        assert post is not None  # as it is not over
        if not self._is_posted:
            self._is_posted = True
            self._transport.mailbox.post(post)
        message = post.message
        if message is None:
            if post.ending is not None:
                self.fails_alone = True
                raise self._error_of(post.ending)
            return False
        if self._received < 0:
            self._begin(message, post.number)
        first = self._received
        while message.frames:
            self._take(message.frames[0])
            message.frames.popleft()  # only now: an interrupt between the two must not lose the chunk
        if self.transfers is not None and self._received > first:
            size_bytes = self.results[0].itemsize
            self.transfers.allow_upload(0, self.results[0], first // size_bytes, self._received // size_bytes)
        return self._received >= message.header.total

    def _error_of(self, ending: Ending) -> FerroError:
        """Why it ends without a message. Whoever posts a recv for what may come need not look at its Work."""
        if ending is Ending.WITHDRAWN:
            return self._withdrawal.again()
        text = f"{self.label} has nobody to send to it: rank {self._peer} has"
        error: FerroError
        if ending is Ending.SENDER_CLOSED:
            hint = "let that rank send before it calls close() on the subgroup"
            error = GroupClosedError(f"{text} closed this subgroup", hint=hint, rank=self._peer)
        else:
            reason = "it closed the group, or called reform()"
            hint = "let that rank send before it closes the group; or call group.reform()"
            error = PeerLostError(self._peer, reason, f"{text} left: {reason}", hint=hint)
        error.mark_shown()
        return error

    def withdraw(self, error: FerroError) -> bool:
        post = self._post
        if post is None:
            return False
        self._withdrawal = error
        return self._transport.mailbox.withdraw(post)

    def advance(self) -> bool:
        """As `Execution.advance`. Only here the message is taken: a driver that has just given up must not lose it."""
        if not super().advance():
            return False
        post = self._post
        if post is not None and post.message is not None:
            self._mine = post.number, post.message
            self._transport.mailbox.take(post)
            self._post = None
        return True

    def _begin(self, message: Message, number: int) -> None:
        spec = message.header.spec
        if self._spec is not None and spec != self._spec:
            raise TensorMismatchError(
                f"rank {self._peer} sent {spec} with tag {self._tag}, but out is {self._spec}",
                hint="call recv without out=, or with a matching one: the message still waits",
            )
        out = self._out if self.transfers is None else self.transfers.host_memory(0, spec)
        if out is None:
            out = np.empty(spec.shape, spec.dtype.storage)
        self.results, self.specs = [out], [spec]
        self._taken, self._received = out.reshape(-1).view(np.uint8), 0
        if not message.grant_sent:
            message.needs_grant = False
            self._transport.grant(self._peer, Key(self._group, POINT_TO_POINT, number), self._tag)
            message.grant_sent = True

    def _take(self, frame: Frame) -> None:
        end = frame.offset + len(frame.payload)
        self._taken[frame.offset : end] = frame.payload
        self._received = end

    def busy_poll(self) -> bool:
        self._transport.busy_poll(self._peer, lambda: self.has_ended)
        return self.has_ended

    def probe(self) -> None:
        """Asks whether the sender has closed the group. Sending on the lane also shows whether the peer is gone.

        One that is complete asks nothing, and one that has a message about this one: others may wait in vain for that peer.
        """
        post = self._post
        if post is not None and not self.has_ended:
            number = ANY_NUMBER if post.message is None else post.number
            self._transport.probe(self._peer, Key(self._group, POINT_TO_POINT, number), self.label)

    def _progress(self) -> str:
        message = None if self._post is None else self._post.message
        return "" if message is None else message.frames.progress

    def explain(self) -> str:
        if self.waits_for_own_gpu:
            return f"{self.label} waits for this rank's own GPU"
        if self.awaited is not None:
            return self._with_reach(f"this rank waits for {self.awaited} of rank {self._peer}")
        who = f"rank {self._peer} to send to rank {self._transport.rank} with tag {self._tag}"
        return self._with_reach(f"{self.label} waits for {who}")

    def timeout_error(self) -> FerroError:
        return self._timed_out("call recv again: nothing was lost and the group goes on")

    def leave(self) -> None:
        """Gives up its place. The message, if it has one, is for the next recv, which begins where this one did."""
        post = self._post
        if post is None:
            return
        message = post.message
        if message is not None and self._received > 0 and not (message.frames and message.frames[0].offset == 0):
            message.frames.appendleft(self._begun(post.number, message))
        self._transport.mailbox.unpost(post)  # which takes the message from the post
        if post.message is None:
            self._mine = None
        self._post = None

    def give_back(self) -> None:
        self.finish()
        mine, self._mine = self._mine, None
        if mine is None or self.transfers is not None:  # it was received in memory that is another operation's by now
            return
        number, message = mine
        message.frames.clear()
        message.frames.append(self._begun(number, message))
        self._transport.mailbox.restore((self._group, self._peer, self._tag), number, message)

    def _begun(self, number: int, message: Message) -> Frame:
        """All that has arrived of the message, as one chunk."""
        arrived = memoryview(self._taken[: self._received].tobytes())
        return Frame(Key(self._group, POINT_TO_POINT, number), self._peer, message.header, 0, arrived)
