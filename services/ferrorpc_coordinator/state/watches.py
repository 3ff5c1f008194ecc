"""Watches on the store, and the recent changes that they can be sent.

A watch lives as long as the stream on which it was made. A client that resumes watches again from the revision it saw last, and
first gets the changes since that revision, including it. If the history does not reach back that far (it is bounded, and empty
after a restart), the first event says `compacted`, and the client must read the keys again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ferrorpc.errors import require
from ferrorpc.v1 import session_pb2, store_pb2
from ferrorpc_coordinator.state.context import JobContext


@dataclass(frozen=True, slots=True)
class Watch:
    """A stream's watch on the keys with a prefix."""

    number: int
    stream: int
    prefix: str


class Watches:
    """The watches of a job, and its recent changes."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._watches: dict[int, Watch] = {}
        self._numbers = 0
        self._history: deque[store_pb2.StoreEvent] = deque()
        self._history_bytes = 0
        self._complete_since = 0

    def add(self, stream: int, prefix: str) -> Watch:
        """Adds a watch; `replay` sends it earlier changes.

        Raises:
            LimitExceededError: the job has too many watches.
        """
        require(f"watches of job {self._context.job}", len(self._watches) + 1, "watches", self._context.limits.watches)
        self._numbers += 1
        watch = self._watches[self._numbers] = Watch(self._numbers, stream, prefix)
        return watch

    def replay(self, watch: Watch, from_revision: int) -> None:
        """Sends a new watch the changes since `from_revision`, or `compacted` if they are no longer known."""
        if from_revision < self._complete_since:
            self._send([watch], store_pb2.StoreEvent(compacted=True, revision=self._complete_since))
        for event in self._history:
            if event.revision >= from_revision and event.key.startswith(watch.prefix):
                self._send([watch], event)

    def forget_until(self, revision: int) -> None:
        """Forgets all changes up to this revision: after a restart, or while the job has no members."""
        self._history.clear()
        self._history_bytes = 0
        self._complete_since = revision + 1

    def remove(self, stream: int | None, number: int) -> bool:
        """Removes a watch of this stream; False if it has none of this number."""
        watch = self._watches.get(number)
        if watch is None or watch.stream != stream:
            return False
        del self._watches[number]
        return True

    def stream_ended(self, stream: int) -> None:
        """Removes the watches of a stream that ended."""
        for number in [watch.number for watch in self._watches.values() if watch.stream == stream]:
            del self._watches[number]

    def changed(self, key: str, value: bytes, revision: int, deleted: bool = False) -> None:
        """Records one change of the store, and sends it to the watches on its prefix."""
        event = store_pb2.StoreEvent(key=key, value=value, deleted=deleted, revision=revision)
        self._history.append(event)
        self._history_bytes += len(key) + len(value)
        limits = self._context.limits
        while len(self._history) > limits.history_events or self._history_bytes > limits.history_bytes:
            oldest = self._history.popleft()
            self._history_bytes -= len(oldest.key) + len(oldest.value)
            self._complete_since = oldest.revision + 1
        self._send([watch for watch in self._watches.values() if key.startswith(watch.prefix)], event)

    def _send(self, watches: list[Watch], event: store_pb2.StoreEvent) -> None:
        """Sends these watches an event, whose value is in memory once for all of them."""
        if watches:
            frame = session_pb2.ServerFrame(event=session_pb2.Event(store=event))
            recipients = [(watch.stream, _numbered(watch.number)) for watch in watches]
            self._context.shared.effects.send(self._context, frame, recipients)


def _numbered(number: int) -> bytes:
    """What makes a frame with an event one for the watch of this number (see Send)."""
    event = session_pb2.Event(store=store_pb2.StoreEvent(watch_id=number))
    return session_pb2.ServerFrame(event=event).SerializeToString()
