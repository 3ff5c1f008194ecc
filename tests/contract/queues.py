"""A backend as a third party might write one: send, recv and barrier over queues between threads."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import numpy as np

from ferrorpc import Backend, BarrierTimeoutError, CollectiveTimeoutError, TensorMismatchError

Array = np.ndarray[Any, Any]


class Wires:
    """What the ranks of one world share."""

    def __init__(self, size: int) -> None:
        self.queues: dict[tuple[int, int, int], queue.Queue[Array]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.meeting = threading.Barrier(size)

    def queue(self, source: int, target: int, tag: int) -> queue.Queue[Array]:
        with self.lock:
            return self.queues[source, target, tag]


class QueueBackend(Backend):
    name = "queues"

    def __init__(self, rank: int, size: int, wires: Wires) -> None:
        self.rank = rank
        self.size = size
        self.wires = wires

    def send(self, data: Array, dst: int, tag: int = 0) -> None:
        self.wires.queue(self.rank, dst, tag).put(data.copy())

    def recv(self, src: int, tag: int = 0, out: Array | None = None, timeout: float | None = None) -> Array:
        waiting = self.wires.queue(src, self.rank, tag)
        try:
            data = waiting.get(timeout=timeout)
        except queue.Empty:
            raise CollectiveTimeoutError([src], f"rank {src} sent nothing within {timeout} s") from None
        if out is None:
            return data
        if (out.dtype, out.shape) != (data.dtype, data.shape):
            with waiting.not_empty:
                waiting.queue.appendleft(data)
                waiting.not_empty.notify()
            raise TensorMismatchError(f"out does not fit {data.dtype} of shape {data.shape}")
        out[...] = data
        return out

    def barrier(self, timeout: float | None = None) -> None:
        try:
            self.wires.meeting.wait(timeout)
        except threading.BrokenBarrierError:
            raise BarrierTimeoutError([], f"not every rank came within {timeout} s") from None

    def close(self) -> None:
        """Nothing is held."""


class MeetingBackend(QueueBackend):
    """One whose send returns only when the peer has received, as MPI's synchronous one does."""

    name = "meetings"

    def send(self, data: Array, dst: int, tag: int = 0) -> None:
        taken = threading.Event()
        self.wires.queue(dst, self.rank, -1 - tag).put(taken)  # type: ignore[arg-type]
        super().send(data, dst, tag)
        taken.wait()

    def recv(self, src: int, tag: int = 0, out: Array | None = None, timeout: float | None = None) -> Array:
        data = super().recv(src, tag, out, timeout)
        self.wires.queue(self.rank, src, -1 - tag).get().set()  # type: ignore[attr-defined]
        return data


def queue_backends(size: int, kind: type[QueueBackend] = QueueBackend) -> list[QueueBackend]:
    """One for each rank of a world."""
    wires = Wires(size)
    return [kind(rank, size, wires) for rank in range(size)]
