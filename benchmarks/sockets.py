"""all_reduce of two ranks over plain TCP sockets: both send everything at once, and add piece by piece as it arrives.

The measured counterpart of a link's computed lower bound.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ferrorpc.cli.bench.runners.base import Action, Runner
from ferrorpc.errors import CollectiveTimeoutError

SECONDS = 60.0
RETRY_SECONDS = 0.05
PIECE_BYTES = 256 << 10


class SocketRunner(Runner):
    """Rank 0 listens on MASTER_ADDR:MASTER_PORT; rank 1 connects."""

    name = "sockets"

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.size != 2:
            raise self.unable(f"world of {self.size} ranks")
        self.version = "plain TCP"
        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._line = _accept(place) if self.rank == 0 else _connect(place)
        self._line.settimeout(SECONDS)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._scratch = np.empty(PIECE_BYTES // 4, np.float32)

    def barrier(self) -> Action:
        return partial(self._sum, np.zeros(1, np.float32))

    def all_reduce(self, array: Any, wire: str | None) -> Action:
        if wire is not None or array.dtype != np.float32:
            raise self.unable("other messages than float32")
        return partial(self._sum, array)

    def close(self) -> None:
        self._line.close()

    def _sum(self, array: np.ndarray[Any, Any]) -> None:
        pieces = [array[start : start + len(self._scratch)] for start in range(0, len(array), len(self._scratch))]
        sent = threading.Semaphore(0)
        sender = threading.Thread(target=self._send, args=(pieces, sent), daemon=True)
        sender.start()
        for piece in pieces:
            arrived = self._scratch[: len(piece)]
            self._receive(memoryview(arrived).cast("B"))
            if not sent.acquire(timeout=SECONDS):  # a piece must be sent before the sum overwrites it
                raise CollectiveTimeoutError([1 - self.rank], f"nothing could be sent for {SECONDS:.0f} s")
            np.add(piece, arrived, out=piece)
        sender.join()

    def _send(self, pieces: list[np.ndarray[Any, Any]], sent: threading.Semaphore) -> None:
        for piece in pieces:
            self._line.sendall(memoryview(piece).cast("B"))
            sent.release()

    def _receive(self, view: memoryview) -> None:
        while view:
            view = view[self._line.recv_into(view) :]


def _accept(place: tuple[str, int]) -> socket.socket:
    with socket.create_server(place) as listener:
        listener.settimeout(SECONDS)
        return listener.accept()[0]


def _connect(place: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            return socket.create_connection(place, SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_SECONDS)
