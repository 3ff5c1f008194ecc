"""The reduction of one bucket: a chain of collectives, each started when the one before is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from ferrorpc.ddp.bucket import Bucket
from ferrorpc.guard import FOREVER, Clock, Parker
from ferrorpc.work import Work


class BucketReduction:
    """Starts the first collective at once; `advance` starts the others.

    Args:
        operations: yields each collective and is sent its result.
        parker: unparked, from any thread, when `advance` may make progress.
        context: makes the context in which collectives are started and their results are handled.

    Attributes:
        started: clock time of the first collective's start.
        ended: clock time at which the last started collective was complete.
    """

    def __init__(
        self,
        bucket: Bucket,
        operations: Generator[Work[Any], Any, None],
        clock: Clock,
        parker: Parker,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.bucket = bucket
        self.started = clock.now()
        self.ended = FOREVER
        self._operations = operations
        self._context = context
        self._clock = clock
        self._parker = parker
        self._work: Work[Any] | None = None
        self._lock = threading.Lock()
        with context():
            self._begin(next(operations))

    def _begin(self, work: Work[Any]) -> None:
        self._work, self.ended = work, FOREVER
        work.on_done(partial(self._completed, work))

    def _completed(self, work: Work[Any]) -> None:
        if work is self._work:
            self.ended = self._clock.now()
        self._parker.unpark()

    def advance(self) -> bool:
        """Starts the collectives that can be started without waiting. True once the last one is complete. Any thread may call
        it."""
        with self._lock:
            while self._work is not None and self._work.has_ended:
                try:
                    with self._context():
                        self._begin(self._operations.send(self._work.wait()))
                except StopIteration:
                    self._work = None
                    self.ended = min(self.ended, self._clock.now())  # `has_ended` is true before on_done callbacks run
            return self._work is None

    def assist(self) -> None:
        """Advances the collective that is in flight on this thread, for a moment, where that is faster than to wait for it."""
        work = self._work
        assist = None if work is None else work.assist  # which is gone as soon as another thread ends the operation
        if assist is not None:
            assist()

    def join(self) -> None:
        """Makes the current stream wait for the first collective. The host waits until that is in its stream."""
        self._wait(host=False)

    def wait(self) -> None:
        """Waits until the first collective is complete, where no other follows."""
        self._wait(host=True)
        self._work, self.ended = None, min(self.ended, self._clock.now())

    def _wait(self, host: bool) -> None:
        if self._work is not None:
            self._work.meter = None  # the step counts its waits itself
            self._work.wait(host=host)

    def abandon(self) -> None:
        """Nobody will wait for it. Its error, which was raised elsewhere, is not logged."""
        if self._work is not None:
            self._work.on_done(partial(_observe, self._work))


def _observe(work: Work[Any]) -> None:
    work.exception()
