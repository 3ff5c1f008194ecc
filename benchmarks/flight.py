"""Sends arrays by pyarrow Flight between two ranks: gRPC in C++, which reads and writes Arrow messages without a copy.

Rank 0 writes record batches of one float32 column, which is the array's own memory, into one DoExchange stream. Rank 1 gets
each as a NumPy array without a copy.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import flight

from ferrorpc.cli.bench.runners.base import Action, Runner

SECONDS = 60.0
SCHEMA = pa.schema([("values", pa.float32())])
ASKS_FOR_ANSWER = b"answer"
ANSWER = b"ok"


class FlightRunner(Runner):
    """Rank 1 serves on MASTER_PORT; rank 0 is its client."""

    name = "Flight"

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"pyarrow {pa.__version__}"
        location = f"grpc://127.0.0.1:{os.environ['MASTER_PORT']}"
        if self.rank == 1:
            self._server = _Server(location)
            return
        self._client = flight.FlightClient(location)
        self._client.wait_for_available(timeout=int(SECONDS))
        self._writer, self._reader = self._client.do_exchange(flight.FlightDescriptor.for_command(b"bench"))
        self._writer.begin(SCHEMA)

    def barrier(self) -> Action:
        small = np.zeros(1, np.float32)
        return (lambda: self.send(small, 1)) if self.rank == 0 else (lambda: self.receive(small, 1))

    def send(self, array: Any, count: int) -> None:
        for number in range(count):
            column = pa.Array.from_buffers(pa.float32(), len(array), [None, pa.py_buffer(array)])
            batch = pa.RecordBatch.from_arrays([column], schema=SCHEMA)
            if number < count - 1:
                self._writer.write_batch(batch)
            else:
                self._writer.write_with_metadata(batch, ASKS_FOR_ANSWER)
        self._reader.read_chunk()

    def receive(self, array: Any, count: int) -> Any:
        return self._server.taken(count)

    def close(self) -> None:
        if self.rank == 0:
            self._writer.close()
            self._client.close()
        else:
            self._server.shutdown()


class _Server(flight.FlightServerBase):  # type: ignore[misc]
    """Receives arrays on the stream's own thread, which is fastest, and answers those that ask for it."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self._taken: queue.SimpleQueue[tuple[int, np.ndarray[Any, Any]]] = queue.SimpleQueue()

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        count = 0
        for chunk in reader:
            array = chunk.data.column(0).to_numpy(zero_copy_only=True)
            count += 1
            if chunk.app_metadata is not None:
                self._taken.put((count, array))
                writer.write_metadata(ANSWER)
                count = 0

    def taken(self, count: int) -> np.ndarray[Any, Any]:
        """Waits for the array that asked for an answer, and checks that it was number `count` since the last one that did."""
        found, array = self._taken.get(timeout=SECONDS)
        assert found == count, f"{found} arrays came for {count}"
        return array
