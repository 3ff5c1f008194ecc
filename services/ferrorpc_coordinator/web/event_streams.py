"""States of jobs, to everybody who looks, as they change.

One task looks at the clock for all viewers. A job's state is made and encoded once a tick, however many look at it, and not
at all while nobody does; a viewer that reads slowly skips states, because each one is complete. Beat ages are sampled for
every job all the time, so that a page which is opened after the fact still shows the last minute.

Cost: at 1,000 ranks about 10 ms of the event loop a tick while somebody looks, under 1 ms otherwise.
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
"""Ticks from one sample of the beat ages to the next."""
VIEWERS_MAX: Final = 64
LOOP_SHARE_MAX: Final = 0.05
"""Of a core. Where states cost more than that, ticks become longer."""


class Viewer:
    """One open page: the latest state it has not been sent yet."""

    __slots__ = ("__weakref__", "_fresh", "job", "latest")

    def __init__(self, job: str) -> None:
        self.job = job
        self.latest: bytes | None = b""
        self._fresh = asyncio.Event()

    def give(self, state: bytes | None) -> None:
        """A newer state, in place of one that was not sent; None ends the stream."""
        self.latest = state
        self._fresh.set()

    async def next(self) -> bytes | None:
        """Waits for a state that is newer than the last."""
        await self._fresh.wait()
        self._fresh.clear()
        return self.latest


class EventStreams:
    """Ticks from `start` to `stop`."""

    def __init__(self, view: CoordinatorView) -> None:
        self._view = view
        self._viewers: weakref.WeakSet[Viewer] = weakref.WeakSet()
        """As long as their streams are there: one that is never begun is never ended either."""
        self._ages: dict[str, deque[dict[str, int]]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to look."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Ends every stream."""
        if self._task is not None:
            self._task.cancel()
        for viewer in self._viewers:
            viewer.give(None)

    def watch(self, job: str) -> AsyncIterator[bytes]:
        """The job's states as server-sent events; first the history of its members' beats.

        Raises:
            LimitExceededError: too many look already.
        """
        if len(self._viewers) >= VIEWERS_MAX:
            raise LimitExceededError(f"{VIEWERS_MAX} pages are open at this coordinator already", limit="viewers")
        viewer = Viewer(job)
        self._viewers.add(viewer)
        return self._watch(viewer)

    async def _watch(self, viewer: Viewer) -> AsyncIterator[bytes]:
        try:
            yield b"retry: 1000\n\n" + _event("history", self.history(viewer.job))
            viewer.give(self._state(viewer.job))
            while (state := await viewer.next()) is not None:
                yield state
        finally:
            self._viewers.discard(viewer)

    def history(self, job: str) -> dict[str, list[int]]:
        """Member -> its beat ages in milliseconds, one a second, oldest first, -1 where it was not there."""
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
                        viewer.give(state)
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
