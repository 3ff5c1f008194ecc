"""send and recv on the receiving side: messages of one (group, source, tag), first in, first out.

Every message has a number, so that asynchronous sends may leave in any order and are still matched in the order of the
calls. A message is handed to a recv when its first chunk is here, and leaves only when the recv has taken it whole: a recv
that times out, or whose `out` does not fit, gives it back untouched.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from ferrorpc.transports.credit import CHUNK_BYTES, EAGER_CHUNKS
from ferrorpc.wire.frames import Frame


class Message:
    """Chunks of one message, as far as they have come."""

    __slots__ = ("frames", "needs_grant", "received")

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.received = 0
        self.needs_grant = False
        """Long, and its sender still waits for the grant of its later chunks."""

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return bool(self.frames) and self.received >= self.frames[0].header.total


class Post:
    """A recv that waits. `message` and `number` are set once one is matched to it."""

    __slots__ = ("message", "number", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.message: Message | None = None
        self.number = 0


class Inbound:
    """The queue of one (group, source, tag). Its caller holds the mailbox's lock; `wake` must not block."""

    def __init__(self) -> None:
        self._messages: dict[int, Message] = {}
        self._posts: deque[Post] = deque()
        self._matched: dict[int, Post] = {}
        self._returned: list[int] = []
        self._next = 1

    def put(self, frame: Frame) -> None:
        """A chunk arrived."""
        number = frame.key.number
        message = self._messages.get(number)
        if message is None:
            message = self._messages[number] = Message()
            message.needs_grant = frame.header.total > EAGER_CHUNKS * CHUNK_BYTES
        message.frames.append(frame)
        message.received += len(frame.payload)
        post = self._matched.get(number)
        if post is not None:
            post.wake()
        else:
            self._match()

    def add(self, post: Post) -> None:
        """A recv waits."""
        self._posts.append(post)
        self._match()

    def give_back(self, post: Post) -> None:
        """The recv ends without its message: the next one gets it."""
        if post.message is None:
            if post in self._posts:
                self._posts.remove(post)
            return
        del self._matched[post.number]
        post.message = None
        heapq.heappush(self._returned, post.number)
        self._match()

    def take(self, post: Post) -> None:
        """The recv has its message whole: it leaves the queue."""
        del self._matched[post.number]
        del self._messages[post.number]

    def _match(self) -> None:
        while self._posts:
            number = self._returned[0] if self._returned else self._next
            message = self._messages.get(number)
            if message is None:
                return
            if self._returned:
                heapq.heappop(self._returned)
            else:
                self._next += 1
            post = self._posts.popleft()
            post.message, post.number = message, number
            self._matched[number] = post
            post.wake()
