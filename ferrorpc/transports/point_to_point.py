"""send and recv on the receiving side: messages of one (group, source, tag), first in, first out.

They begin to leave in the order of the calls, are numbered in it, and no lane lets first chunks overtake each other. A message
is handed to a recv when its first chunk is here, and leaves only when the recv has taken it whole: a recv that times out, or
whose `out` does not fit, gives it back untouched.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from ferrorpc.errors import CodecError
from ferrorpc.transports.credit import EAGER_BYTES
from ferrorpc.transports.reassembly import ReassemblyQueue
from ferrorpc.wire.frames import Frame


def ungranted_error(frame: Frame) -> CodecError:
    """The error of a chunk that came before its receiver had granted it."""
    return CodecError(
        f"rank {frame.source} sent byte {frame.offset} of {frame.header.signature or 'a message'} #{frame.key.number} without "
        "having been told that it may"
    )


class Message:
    """Chunks of one message, as far as they have come and not been taken."""

    __slots__ = ("frames", "header", "needs_grant", "unexpected_bytes")

    def __init__(self, first: Frame) -> None:
        self.unexpected_bytes = 0
        """Bytes of it that came before a recv waited for it."""
        self.header = first.header
        self.frames = ReassemblyQueue(first.header)
        """Filled by the mailbox, emptied by the recv it is matched to."""
        self.needs_grant = first.header.total > EAGER_BYTES
        """Whether its sender still waits for the grant of the later chunks of a long message."""


class PostedReceive:
    """A recv that waits. `number` and then `message` are set once one is matched to it."""

    __slots__ = ("message", "number", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.message: Message | None = None
        self.number = 0


class ReceiveQueue:
    """The queue of one (group, source, tag). Called under the mailbox's lock; recvs that methods return are woken after it."""

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._posts: deque[PostedReceive] = deque()
        self._matched: dict[int, PostedReceive] = {}
        self._begun: list[int] = []
        """A heap: numbers of messages whose first chunk is here, and which no recv has."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is here and nobody waits."""
        return not self._messages and not self._posts

    def is_awaited(self, number: int) -> bool:
        """Whether a recv has been given the message of this number."""
        return number in self._matched

    def put(self, frame: Frame, unexpected_bytes: int) -> list[PostedReceive]:
        """Takes in a chunk, of which so many bytes were not asked for. Returns the recvs to wake.

        Raises:
            CodecError: it has come before, or its message has to be granted first.
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
        """Queues a recv. Returns the recvs that have been given a message."""
        self._posts.append(post)
        return self._match()

    def give_back(self, post: PostedReceive) -> list[PostedReceive]:
        """The recv ends without its message, which goes to the next one. Returns the recvs that have been given a message."""
        if post.message is None:
            if post in self._posts:
                self._posts.remove(post)
            return []
        del self._matched[post.number]
        post.message = None
        heapq.heappush(self._begun, post.number)
        return self._match()

    def take(self, post: PostedReceive) -> int:
        """Removes a message that its recv has taken whole. Returns how many of its bytes had come unasked."""
        del self._matched[post.number]
        return self._messages.pop(post.number).unexpected_bytes

    def _match(self) -> list[PostedReceive]:
        woken = []
        while self._posts and self._begun:
            post = self._posts.popleft()
            post.number = number = heapq.heappop(self._begun)
            post.message = self._messages[number]
            self._matched[number] = post
            woken.append(post)
        return woken
