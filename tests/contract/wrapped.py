"""A backend that a third party made around another's: its send, recv and barrier, and nothing more."""

from __future__ import annotations

from typing import Any

from ferrorpc import Backend, SimulatedBackend


class WrappedBackend(Backend):
    name = "wrapped"

    def __init__(self, inner: Backend) -> None:
        self.rank = inner.rank
        self.size = inner.size
        self.inner = inner

    def send(self, data: Any, dst: int, tag: int = 0) -> None:
        self.inner.send(data, dst, tag)

    def recv(self, src: int, tag: int = 0, out: Any = None, timeout: float | None = None) -> Any:
        return self.inner.recv(src, tag, out, timeout)

    def barrier(self, timeout: float | None = None) -> None:
        self.inner.barrier(timeout)

    def close(self) -> None:
        self.inner.close()


def wrapped_backends(size: int) -> list[WrappedBackend]:
    """One for each rank of a world."""
    return [WrappedBackend(backend) for backend in SimulatedBackend.create_group(size)]
