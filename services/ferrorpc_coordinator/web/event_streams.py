"""Streams the states of jobs to all open pages, as server-sent events.

One task serves all viewers. A job's state is built and encoded once per tick, however many viewers it has, and not at all if it
has none. A viewer that reads slowly skips states, since each one is complete. The age of the last beat is sampled for all jobs
all the time, so that a page that is opened later can show the last minute.

Cost: at 1,000 ranks about 10 ms of the event loop per tick while somebody watches, under 1 ms otherwise.
"""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Final

from ferrorpc.errors import LimitExceededError
from ferrorpc_coordinator.state.job import Job
from ferrorpc_coordinator.web.view import CoordinatorView

TICK_SECONDS: Final = 0.5
SAMPLES_MAX: Final = 60
SAMPLE_TICKS: Final = 2
"""Ticks between two samples of the beat ages."""
VIEWERS_MAX: Final = 64
LOOP_SHARE_MAX: Final = 0.05
"""Share of a core. If building states needs more, ticks become longer."""


class Viewer:
    """One open page, with the latest state that it has not been sent."""

    __slots__ = ("__weakref__", "_fresh", "job", "latest")

    def __init__(self, job: str) -> None:
        self.job = job
        self.latest: bytes | None = b""
        self._fresh = asyncio.Event()

    def set_latest(self, state: bytes | None) -> None:
        """Replaces the state that was not sent yet; None ends the stream."""
        self.latest = state
        self._fresh.set()

    async def next(self) -> bytes | None:
        """Waits for a state newer than the last."""
        await self._fresh.wait()
        self._fresh.clear()
        return self.latest


class EventStreams:
    """The streams of one coordinator, updated from `start` to `stop`."""

    def __init__(self, view: CoordinatorView) -> None:
        self._view = view
        self._viewers: weakref.WeakSet[Viewer] = weakref.WeakSet()
        """Weak, because a stream that is never started is never closed either."""
        self._ages: dict[str, deque[dict[str, int]]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts the task."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Ends every stream."""
        if self._task is not None:
            self._task.cancel()
        for viewer in self._viewers:
            viewer.set_latest(None)

    def watch(self, job: str) -> AsyncIterator[bytes]:
        """The job's states as server-sent events, after the history of its members' beats.

        Raises:
            LimitExceededError: too many viewers.
        """
        if len(self._viewers) >= VIEWERS_MAX:
            raise LimitExceededError(f"{VIEWERS_MAX} pages are open at this coordinator already", limit="viewers")
        viewer = Viewer(job)
        self._viewers.add(viewer)
        return self._watch(viewer)

    async def _watch(self, viewer: Viewer) -> AsyncIterator[bytes]:
        try:
            yield b"retry: 1000\n\n" + _event("history", self.history(viewer.job))
            viewer.set_latest(self._state(viewer.job))
            while (state := await viewer.next()) is not None:
                yield state
        finally:
            self._viewers.discard(viewer)

    def history(self, job: str) -> dict[str, list[int]]:
        """Member -> its beat ages in milliseconds, one per second, oldest first, -1 while it was not a living member."""
        samples = list(self._ages.get(job, ()))
        return {name: [sample.get(name, -1) for sample in samples] for name in (samples[-1] if samples else ())}

    async def _run(self) -> None:
        tick, pause = 0, TICK_SECONDS
        while True:
            await asyncio.sleep(pause)
            began = time.thread_time()
            tick += 1
            if tick % SAMPLE_TICKS == 0:
                self._sample()
            for job in {viewer.job for viewer in self._viewers}:
                state = self._state(job)
                for viewer in self._viewers:
                    if viewer.job == job:
                        viewer.set_latest(state)
            pause = max(TICK_SECONDS, (time.thread_time() - began) / LOOP_SHARE_MAX)

    def _sample(self) -> None:
        jobs = self._view.coordinator.jobs
        for gone in self._ages.keys() - jobs.keys():
            del self._ages[gone]
        for name, job in jobs.items():
            self._ages.setdefault(name, deque(maxlen=SAMPLES_MAX)).append(_beat_ages(job))

    def _state(self, name: str) -> bytes:
        job = self._view.job(name)
        return _event("state", None if job is None else self._view.state(job))


def _beat_ages(job: Job) -> dict[str, int]:
    now = job.context.now
    return {member.name: max(0, now - member.last_heard) // 1_000_000 for member in job.members if member.alive}


def _event(kind: str, value: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), json.dumps(value, separators=(",", ":")).encode())
