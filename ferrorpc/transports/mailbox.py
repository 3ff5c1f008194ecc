"""The mailbox: keeps what has arrived at a rank until the operation that it belongs to takes it.

Reader threads put frames, grants and probe answers in. The driver of each operation takes them out. Three rules hold for
messages that do not fit:

1. A frame of an operation that this rank has not entered is unexpected and waits. Of each message only the chunks that need no
   grant may arrive, and all together may take `unexpected_bytes_max` bytes. More ends the generation.
2. A frame whose signature differs from the local call's is reported at once, whether it arrives before, during or after that
   call. A call that is not finished fails. (The signatures of finished operations are kept in a bounded history.)
3. A frame of an operation older than the history is dropped, and so is what nobody will take in a closed group: its messages of
   sends, and those of operations that this rank has not begun.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from typing import Final, NamedTuple

from ferrorpc.errors import CodecError, CollectiveMismatchError, FerroError, GroupAbortedError, LimitExceededError
from ferrorpc.guard import wake_nobody
from ferrorpc.transports.closed_groups import Begun, ClosedGroups
from ferrorpc.transports.credit import EAGER_BYTES, FRAME_COST_BYTES, unexpected_bytes_max as default_bytes_max
from ferrorpc.transports.point_to_point import ANY_NUMBER, Ending, Message, Place, PostedReceive, ReceiveQueue, ungranted_error
from ferrorpc.transports.reassembly import ReassemblyQueue
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire.frames import POINT_TO_POINT, Frame, Key

HISTORY: Final = 4096
"""Number of finished operations whose signature is kept."""

GRANTS_MAX: Final = 65_536
"""More messages than any operation sends."""

SAME: Final = int(transport_pb2.STANDING_SAME)
DIFFERENT: Final = int(transport_pb2.STANDING_DIFFERENT)
ABSENT: Final = int(transport_pb2.STANDING_ABSENT)
FINISHED: Final = int(transport_pb2.STANDING_FINISHED)


class Standing(NamedTuple):
    """How far a rank is in an operation: its answer to a probe."""

    standing: int
    signature: str
    last_number: int
    last_signature: str


class CallRecord(NamedTuple):
    """What this rank knows about an operation that sends no messages.

    Attributes:
        signature: of the local call with that key; None where there was none or it is not known any more.
        last_number: of the latest call.
        last_signature: of the latest call.
    """

    signature: str | None
    last_number: int
    last_signature: str


class Box:
    """What has arrived for one operation. Filled by reader threads, emptied by the operation's driver."""

    __slots__ = (
        "answers",
        "arrivals",
        "expected",
        "frames",
        "granted",
        "refused",
        "signature",
        "unexpected_bytes",
        "ungranted",
        "wake",
    )

    def __init__(self) -> None:
        self.signature: str | None = None
        """The local call's signature; None until this rank has entered."""
        self.wake: Callable[[], None] = wake_nobody
        self.refused: CollectiveMismatchError | None = None
        """Set when a frame of a different call has arrived: the operation fails with it."""
        self.frames: dict[tuple[int, int], ReassemblyQueue] = {}
        """The chunks of each message, by (source, slot)."""
        self.arrivals: deque[tuple[int, int]] = deque()
        """(source, slot) of each chunk that arrived since the driver last looked."""
        self.granted: set[tuple[int, int]] = set()
        """(peer, slot) of the messages whose remaining chunks may be sent."""
        self.ungranted: deque[tuple[int, int]] = deque()
        """(source, slot) of long messages that wait for this rank's grant."""
        self.answers: dict[int, Standing] = {}
        """Each peer's answer to the last probe."""
        self.expected: Container[tuple[int, int]] = ()
        """(source, slot) of the messages that the driver awaits."""
        self.unexpected_bytes = 0
        """Bytes that arrived before this rank entered, or in messages that it does not await."""

    def put(self, frame: Frame) -> None:
        """Appends a chunk."""
        place = (frame.source, frame.header.slot)
        queue = self.frames.get(place)
        if queue is None:
            queue = self.frames[place] = ReassemblyQueue(frame.header)
        queue.put(frame)
        self.arrivals.append(place)
        if frame.offset == 0 and frame.header.total > EAGER_BYTES:
            self.ungranted.append(place)


def _wake(posts: list[PostedReceive]) -> None:
    """Wakes recvs. Called without the mailbox's lock, because a woken recv may take it at once."""
    for post in posts:
        post.wake()


class Mailbox:
    """All boxes of one rank in one generation.

    Args:
        rank: own world rank, for error messages.
        report: breaks the generation with an error, such as one of bytes that are no frame; must not block. Also for lanes.
        unexpected_bytes_max: limit of the unexpected messages that wait; None for the default (credit.py).
    """

    def __init__(self, rank: int, report: Callable[[FerroError], None], unexpected_bytes_max: int | None = None) -> None:
        self.rank = rank
        self.report = report
        self._unexpected_bytes_max = default_bytes_max() if unexpected_bytes_max is None else unexpected_bytes_max
        self._unexpected_bytes = 0
        self._lock = threading.Lock()
        self._boxes: dict[Key, Box] = {}
        self._history: OrderedDict[Key, str] = OrderedDict()
        self._last: dict[tuple[int, int], tuple[int, str]] = {}
        self._lookups: dict[int, weakref.WeakMethod[Callable[[Key], CallRecord]]] = {}
        self._missed: set[tuple[int, Key]] = set()
        self._closed = ClosedGroups()
        self._sending: dict[Key, Box] = {}
        self._unsent: dict[Key, int] = {}
        """Messages of which nothing was sent yet, and their receivers."""
        self._silent: dict[tuple[int, int], Ending] = {}
        """(group, rank) of the peers that send nothing more in a group in which this rank may still receive from them."""
        self._inbound: dict[Place, ReceiveQueue] = {}

    def enter(self, key: Key, signature: str, wake: Callable[[], None], expected: Container[tuple[int, int]] = ()) -> Box:
        """Enters an operation that this rank has called. Returns its box, with whatever arrived early.

        An operation may be entered again, for its next part.

        Args:
            expected: (source, slot) of the messages that it awaits. Others count as unexpected.
        """
        with self._lock:
            box = self._boxes.get(key)
            if box is None:
                box = self._boxes[key] = Box()
            self._unexpected_bytes -= box.unexpected_bytes
            box.signature, box.wake, box.unexpected_bytes = signature, wake, 0
            box.expected = expected
            if key.group not in self._closed and key.number >= self._last.get((key.group, key.stream), (0, ""))[0]:
                self._last[key.group, key.stream] = key.number, signature
            early = [queue[0] for queue in box.frames.values() if queue and queue[0].header.signature != signature]
            if early:
                box.frames.clear()
                box.refused = self._mismatch(key, signature, early[0].source, early[0].header.signature)
        if box.refused is not None:
            self.report(box.refused)
        return box

    def record(self, key: Key, signature: str) -> None:
        """Records the call of an operation in which this rank only sends, so that probes of peers can be answered.

        A box is made only where a message of the operation has arrived already.
        """
        with self._lock:
            if key not in self._boxes:
                self._remember(key, signature)
                if key.group not in self._closed:
                    self._last[key.group, key.stream] = key.number, signature
                return
        self.enter(key, signature, wake_nobody)

    def register_lookup(self, group: int, entered: Callable[[Key], CallRecord]) -> None:
        """Registers a bound method that is asked about operations of this group without messages (those in shared memory).

        Only a weak reference to it is kept: its object refers to this mailbox, and its memory must be freed when the group is
        closed. A reference that dies drops itself, without the lock: it may die at any point of any thread.
        """
        lookups = self._lookups
        lookups[group] = weakref.WeakMethod(entered, lambda _: lookups.pop(group, None))

    def retire(self, group: int, begun: Sequence[Begun], reason: str = "") -> None:
        """The group is closed: this rank begins no operation of it any more, and receives no send.

        Peers that wait for one that has not begun are told. What has come of such a one, or was sent, is dropped, and so is
        what comes later.

        Args:
            begun: as for `Backend.retire`.
            reason: the same.
        """
        with self._lock:
            self._closed.add(group, begun, reason)
            for stream in [place for place in self._last if place[0] == group]:
                del self._last[stream]
            self._missed -= {missed for missed in self._missed if missed[1].group == group}
            self._silent = {silent: ending for silent, ending in self._silent.items() if silent[0] != group}
            for key, box in list(self._boxes.items()):
                if key.group == group and box.signature is None and self._closed.never_begins(key):
                    self._unexpected_bytes -= self._boxes.pop(key).unexpected_bytes
            for place in [place for place in self._inbound if place[0] == group]:
                self._unexpected_bytes -= self._inbound.pop(place).unexpected_bytes

    def leave(self, key: Key) -> None:
        """Ends an operation on this rank. Its signature stays in the history."""
        with self._lock:
            box = self._boxes.pop(key, None)
            if box is not None:
                self._unexpected_bytes -= box.unexpected_bytes
            if box is not None and box.signature is not None:
                self._remember(key, box.signature)

    def _remember(self, key: Key, signature: str) -> None:
        self._history[key] = signature
        if len(self._history) > HISTORY:
            self._history.popitem(last=False)

    def deliver(self, frame: Frame) -> bool:
        """Adds a chunk. Called by reader threads; never blocks. Returns False, and reports it, where the chunk is invalid."""
        try:
            self._deliver(frame)
        except (CodecError, LimitExceededError) as error:
            self.report(error)
            return False
        return True

    def _deliver(self, frame: Frame) -> None:
        key = frame.key
        if key.stream == POINT_TO_POINT:
            with self._lock:
                woken = self._put_point_to_point(frame)
            _wake(woken)
            return
        difference, theirs = None, frame.header.signature
        with self._lock:
            box = self._boxes.get(key)
            mine = self._history.get(key) if box is None else box.signature
            if mine is None and (box is not None or key.number > self._forgotten(key)) and not self._closed.never_begins(key):
                box = self._put_early(box, frame)
            if mine is not None and mine != theirs:
                difference = self._mismatch(key, mine, frame.source, theirs)
            if box is not None:
                wake, box.refused = box.wake, box.refused or difference
                if mine is not None and difference is None:
                    if (frame.source, frame.header.slot) not in box.expected:
                        box.unexpected_bytes += self._count_unexpected(frame)
                    box.put(frame)
        if difference is not None:
            self.report(difference)
        if box is not None:
            wake()

    def _put_early(self, box: Box | None, frame: Frame) -> Box:
        """Keeps a chunk of an operation that this rank has not entered."""
        if frame.offset >= EAGER_BYTES:
            raise ungranted_error(frame)
        size_bytes = self._count_unexpected(frame)
        if box is None:
            box = self._boxes[frame.key] = Box()
        box.unexpected_bytes += size_bytes
        box.put(frame)
        return box

    def _put_point_to_point(self, frame: Frame) -> list[PostedReceive]:
        """Keeps a chunk of a `send`, unless its group was closed. Returns the recvs to wake."""
        if frame.key.group in self._closed:
            return []
        place = (frame.key.group, frame.source, frame.header.slot)
        inbound = self._inbound.get(place)
        # What follows the eager chunks was granted, or `put` refuses it: a recv has asked for it, though it may have given up.
        is_awaited = frame.offset >= EAGER_BYTES or (inbound is not None and inbound.is_awaited(frame.key.number))
        size_bytes = 0 if is_awaited else self._count_unexpected(frame)
        return self._inbound_of(place).put(frame, size_bytes)

    def _count_unexpected(self, frame: Frame) -> int:
        """Counts an unexpected chunk and returns its bytes. Raises LimitExceededError beyond the limit."""
        size_bytes = len(frame.payload) + FRAME_COST_BYTES
        most = self._unexpected_bytes_max
        if self._unexpected_bytes + size_bytes > most:
            raise LimitExceededError(
                f"{self._unexpected_bytes >> 20} MiB wait in rank {self.rank} that it has not asked for, the latest from rank "
                f"{frame.source} ({frame.header.signature or 'send'} #{frame.key.number}); "
                f"the limit UNEXPECTED_BYTES is {most >> 20} MiB",
                hint="let ranks that send or start operations without waiting meet the others now and then, as in barrier()",
                limit="UNEXPECTED_BYTES",
                most=most,
            )
        self._unexpected_bytes += size_bytes
        return size_bytes

    def _forgotten(self, key: Key) -> int:
        """The largest number of stream 0 that is older than the history; -1 for other streams, which may skip numbers."""
        if key.stream != 0:
            return -1
        return self._last_call(key)[0] - HISTORY

    def _last_call(self, key: Key) -> tuple[int, str]:
        """Number and signature of the latest operation in that stream; of one in a closed group the number only."""
        begun = self._closed.begun_in_stream_of(key)
        if begun is not None:
            return max(begun.last, 0), ""
        return self._last.get((key.group, key.stream), (0, ""))

    def granted(self, peer: int, key: Key, slot: int) -> None:
        """Takes a grant: `peer` has entered the operation, so the rest of message `slot` may be sent to it.

        Raises:
            CodecError: more grants than any operation has messages.
        """
        with self._lock:
            box = self._own_box(key)
            if box is None:
                return
            if len(box.granted) >= GRANTS_MAX:
                raise CodecError(f"rank {peer} grants more than {GRANTS_MAX} messages of one operation")
            box.granted.add((peer, slot))
        box.wake()

    def _own_box(self, key: Key) -> Box | None:
        """The box of an operation of this rank: of a send, where the key is one's."""
        return (self._sending if key.stream == POINT_TO_POINT else self._boxes).get(key)

    def standing(self, peer: int, key: Key, signature: str) -> Standing:
        """The answer to a peer's probe: how far this rank is in that operation.

        One that this rank will never enter, because it has closed the group, ends the generation. A send to it is over: what
        was sent before is dropped, too, and no rank but the sender waits for it. So is a recv from it, once all that this rank
        sends to that peer in the group has begun to leave.
        """
        if key.stream == POINT_TO_POINT:
            over = key.group in self._closed and (key.number != ANY_NUMBER or not self._has_unsent(key.group, peer))
            return Standing(FINISHED if over else ABSENT, "", 0, "")
        if self._closed.never_begins(key):
            self.report(GroupAbortedError(self.rank, self._closed.explain(key, signature)))
        with self._lock:
            box = self._boxes.get(key)
            entered = box.signature if box is not None else None
            finished = self._history.get(key)
            last_number, last_signature = self._last_call(key)
        mine = entered if entered is not None else finished
        reference = self._lookups.get(key.group)
        lookup = None if reference is None else reference()
        if mine is None and lookup is not None:
            call = lookup(key)
            mine = call.signature
            last_number, last_signature = max((last_number, last_signature), (call.last_number, call.last_signature))
        if mine is None:
            passed = key.stream == 0 and last_number >= key.number
            return Standing(FINISHED if passed else ABSENT, "", last_number, last_signature)
        if mine != signature:
            return Standing(DIFFERENT, mine, last_number, last_signature)
        return Standing(SAME if entered is not None else FINISHED, mine, last_number, last_signature)

    def probe_answered(self, peer: int, key: Key, answer: Standing) -> None:
        """Keeps the answer to a probe. An answer that names a different call is a mismatch, although no frame arrived.

        One to the probe of a recv concerns all that wait for that peer, and comes after the first chunks that it has sent.
        """
        if key.stream == POINT_TO_POINT and key.number == ANY_NUMBER:
            if answer.standing == FINISHED:
                self._end_recvs(key.group, peer, Ending.SENDER_CLOSED)
            return
        with self._lock:
            box = self._own_box(key)
            if box is None or box.signature is None:
                return
            box.answers[peer] = answer
            mine = box.signature
        if key.stream == POINT_TO_POINT:
            box.wake()
        if answer.standing == DIFFERENT and answer.signature != mine:
            self.report(self._mismatch(key, mine, peer, answer.signature))

    def _end_recvs(self, group: int, source: int, ending: Ending) -> None:
        """Ends the recvs that wait for a message of a rank which sends nothing more in their group."""
        with self._lock:
            queues = [queue for place, queue in self._inbound.items() if place[:2] == (group, source)]
            if queues and group not in self._closed:  # it was asked
                self._silent[group, source] = ending
            woken = [post for queue in queues for post in queue.end(ending)]
        _wake(woken)

    def still_needs(self, peer: int, key: Key, is_whole: bool = True) -> bool:
        """Whether an operation waits in vain for a peer that has left, which then counts as lost.

        Everything that the peer sent is in this mailbox by now. So recvs without a message end, which concerns this rank alone.
        For any other operation the message may have arrived just after it looked: it is asked about a second time.

        Args:
            is_whole: whether no stream of the peer was cut: else a recv's message may be lost.
        """
        if is_whole and key.stream == POINT_TO_POINT and key.number == ANY_NUMBER:
            self._end_recvs(key.group, peer, Ending.SENDER_LEFT)
            return False
        with self._lock:
            before = (peer, key) in self._missed
            self._missed.add((peer, key))
            return before

    def start_sending(self, peer: int, key: Key, box: Box) -> None:
        """Directs what the receiver of a point-to-point message answers to this box."""
        with self._lock:
            self._sending[key] = box
            self._unsent[key] = peer

    def began_sending(self, key: Key) -> None:
        """The first chunk of the message was sent."""
        with self._lock:
            self._unsent.pop(key, None)

    def stop_sending(self, key: Key) -> None:
        """Ends `start_sending`: the message was sent."""
        with self._lock:
            self._sending.pop(key, None)
            self._unsent.pop(key, None)

    def _has_unsent(self, group: int, peer: int) -> bool:
        """Whether there is a message to that peer of which nothing was sent yet."""
        with self._lock:
            return any(key.group == group and to == peer for key, to in self._unsent.items())

    def post(self, post: PostedReceive) -> None:
        """Posts a recv."""
        with self._lock:
            queue = self._inbound_of(post.place)
            woken = queue.add(post)
            ending = self._silent.get(post.place[:2])
            if ending is not None:
                woken += queue.end(ending)
        _wake(woken)

    def take(self, post: PostedReceive) -> None:
        """Removes the message that a recv has taken completely."""
        with self._lock:
            inbound = self._inbound_of(post.place)
            self._unexpected_bytes -= inbound.take(post)
            if inbound.is_idle:
                del self._inbound[post.place]

    def restore(self, place: Place, number: int, message: Message) -> None:
        """Undoes `take`: the message, which has its bytes again, is for the next recv, if one can come."""
        with self._lock:
            if place[0] in self._closed:
                return
            woken = self._inbound_of(place).restore(number, message)
        _wake(woken)

    def unpost(self, post: PostedReceive) -> None:
        """Withdraws a recv. Its message, complete or not, is kept for the next one."""
        with self._lock:
            inbound = self._inbound_of(post.place)
            woken = inbound.give_back(post)
            if inbound.is_idle:
                del self._inbound[post.place]
        _wake(woken)

    def withdraw(self, post: PostedReceive) -> bool:
        """Ends a recv, unless it has a message. Returns whether it does."""
        with self._lock:
            if post.message is not None:
                return False
            post.ending = Ending.WITHDRAWN
        post.wake()
        return True

    def put_back(self, post: PostedReceive) -> None:
        """Withdraws a recv that has read its message where it is. The message, also if it was taken, is for the next recv."""
        message = post.message
        self.unpost(post)  # clears `post.message`, unless the message was taken
        if message is not None and post.message is message:
            post.message = None
            self.restore(post.place, post.number, message)

    def _inbound_of(self, place: Place) -> ReceiveQueue:
        inbound = self._inbound.get(place)
        if inbound is None:
            inbound = self._inbound[place] = ReceiveQueue()
        return inbound

    def _mismatch(self, key: Key, mine: str, peer: int, theirs: str) -> CollectiveMismatchError:
        where = f"operation {key.number}" + (f" of group {key.group:x}" if key.group else "")
        text = (
            f"ranks {self.rank} and {peer} disagree about {where}: rank {self.rank} called {mine}, rank {peer} called {theirs}"
        )
        return CollectiveMismatchError({self.rank: mine, peer: theirs}, text, number=key.number)
