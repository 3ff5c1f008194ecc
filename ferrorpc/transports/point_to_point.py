"""The receiving side of send and recv: messages of one (group, source, tag) are matched to recvs first in, first out.

Messages are numbered in the order of the send calls, and no lane lets first chunks overtake each other. A message is matched to
a recv when its first chunk has arrived. It is removed only once the recv has taken all of it: a recv that times out, or whose
`out` does not fit, returns it unchanged for the next recv.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from enum import Enum, auto, unique
from typing import Final, TypeAlias

from ferrorpc.errors import CodecError
from ferrorpc.transports.credit import EAGER_BYTES
from ferrorpc.transports.reassembly import ReassemblyQueue
from ferrorpc.wire.frames import Frame

Place: TypeAlias = tuple[int, int, int]
"""Group, source and tag of messages that are received first in, first out."""
ANY_NUMBER: Final = 0
"""In place of a message's number, which is larger, in the probe of a recv, which does not know it."""


def ungranted_error(frame: Frame) -> CodecError:
    """The error for a chunk that arrived before its receiver had granted it."""
    return CodecError(
        f"rank {frame.source} sent byte {frame.offset} of {frame.header.signature or 'a message'} #{frame.key.number} without "
        "having been told that it may"
    )


@unique
class Ending(Enum):
    """Why no message comes for a recv."""

    SENDER_CLOSED = auto()
    """Its sender has closed their subgroup."""
    SENDER_LEFT = auto()
    """Its sender has left the generation."""
    WITHDRAWN = auto()
    """This rank leaves the generation, or closes the subgroup."""


class Message:
    """One message: its chunks that have arrived and were not taken yet."""

    __slots__ = ("frames", "grant_sent", "header", "needs_grant", "unexpected_bytes")

    def __init__(self, first: Frame) -> None:
        self.unexpected_bytes = 0
        """Bytes that arrived before a recv was matched to it."""
        self.header = first.header
        self.frames = ReassemblyQueue(first.header)
        """Filled by the mailbox, emptied by the matched recv."""
        self.needs_grant = first.header.total > EAGER_BYTES
        """Whether no recv has begun to take it, so that its chunks after the eager ones must not come yet."""
        self.grant_sent = not self.needs_grant
        """Whether its sender may send all of it. Set after the grant, which an interrupt may have kept from being sent."""


class PostedReceive:
    """A recv of the next message of a place. `number` and then `message` are set when a message is matched to it."""

    __slots__ = ("ending", "message", "number", "place", "wake")

    def __init__(self, place: Place, wake: Callable[[], None]) -> None:
        self.place = place
        self.wake = wake
        self.message: Message | None = None
        self.number = 0
        self.ending: Ending | None = None
        """Set where it has no message and none comes."""


class ReceiveQueue:
    """The messages and posted recvs of one place.

    Called under the mailbox's lock. Methods return the recvs that the caller wakes once it has released the lock.
    """

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._posts: deque[PostedReceive] = deque()
        self._matched: dict[int, PostedReceive] = {}
        self._begun: list[int] = []
        """A heap: numbers of the messages whose first chunk has arrived and which have no recv yet."""

    @property
    def is_idle(self) -> bool:
        """Whether there are no messages and no posted recvs."""
        return not self._messages and not self._posts

    @property
    def unexpected_bytes(self) -> int:
        """The unexpected bytes of its messages."""
        return sum(message.unexpected_bytes for message in self._messages.values())

    def is_awaited(self, number: int) -> bool:
        """Whether the message of this number is matched to a recv."""
        return number in self._matched

    def put(self, frame: Frame, unexpected_bytes: int) -> list[PostedReceive]:
        """Adds a chunk, of which so many bytes are unexpected. Returns the recvs to wake.

        Raises:
            CodecError: it has arrived before, or its message has to be granted first.
        """
        number = frame.key.number
        message = self._messages.get(number)
        if message is None:
            message = Message(frame)
        if message.needs_grant and frame.offset >= EAGER_BYTES:
            raise ungranted_error(frame)
        message.frames.put(frame)
        message.unexpected_bytes += unexpected_bytes
        self._messages[number] = message
        if frame.offset == 0:
            heapq.heappush(self._begun, number)
        post = self._matched.get(number)
        return self._match() if post is None else [post]

    def add(self, post: PostedReceive) -> list[PostedReceive]:
        """Posts a recv. Returns the recvs that were matched to a message."""
        self._posts.append(post)
        return self._match()

    def give_back(self, post: PostedReceive) -> list[PostedReceive]:
        """Withdraws a recv; its message goes to the next one. Returns the recvs that were matched to a message."""
        if post in self._posts:
            self._posts.remove(post)
        if self._matched.get(post.number) is not post:
            return []  # it has none, or it was taken and its recv interrupted before it knew
        del self._matched[post.number]
        post.message = None
        if post.number not in self._begun:
            heapq.heappush(self._begun, post.number)
        return self._match()

    def end(self, ending: Ending) -> list[PostedReceive]:
        """Nothing more comes: ends the recvs that have no message, and returns them."""
        for post in self._posts:
            post.ending = ending
        return list(self._posts)

    def take(self, post: PostedReceive) -> int:
        """Removes a message that its recv has taken completely. Returns how many of its bytes were unexpected.

        A recv that was interrupted before it knew calls it again.
        """
        if post.number not in self._matched:
            return 0
        del self._matched[post.number]
        return self._messages.pop(post.number).unexpected_bytes

    def restore(self, number: int, message: Message) -> list[PostedReceive]:
        """Undoes `take`. Returns the recvs that were matched to a message."""
        message.unexpected_bytes = 0
        self._messages[number] = message
        heapq.heappush(self._begun, number)
        return self._match()

    def _match(self) -> list[PostedReceive]:
        woken = []
        while self._posts and self._begun:
            post, number = self._posts[0], self._begun[0]
            post.number, self._matched[number] = number, post  # first: after an interrupt `give_back` finds it
            post.message = self._messages[number]
            heapq.heappop(self._begun)
            self._posts.popleft()
            woken.append(post)
        return woken
