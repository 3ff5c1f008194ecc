"""Sends arrays in the obvious way with gRPC in Python: their bytes in a generated protobuf message, on a client stream.

The message is that of ferrorpc's own frames, without a limit of its size.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ferrorpc.cli.bench.runners.base import Action, Runner

# Import ferrorpc first: it sets environment variables that gRPC reads when it is imported.
# isort: split
import google.protobuf
import grpc
import numpy as np

from ferrorpc.types import DType
from ferrorpc.v1 import transport_pb2, transport_pb2_grpc

SECONDS = 60.0
IN_FLIGHT = 2
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.enable_http_proxy", 0)]


class ProtobufStreamRunner(Runner):
    """Rank 1 serves on MASTER_PORT; rank 0 is its client."""

    name = "the protobuf stream"

    def __init__(self, settings: Mapping[str, str]) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.version = f"grpcio {grpc.__version__}, protobuf {google.protobuf.__version__}"
        address = f"127.0.0.1:{os.environ['MASTER_PORT']}"
        if self.rank == 1:
            self._servicer = _Servicer()
            self._server = grpc.server(ThreadPoolExecutor(2), options=OPTIONS)
            transport_pb2_grpc.add_WorkerServiceServicer_to_server(self._servicer, self._server)
            self._server.add_insecure_port(address)
            self._server.start()
            return
        self._queue: queue.Queue[transport_pb2.DataMessage | None] = queue.Queue(IN_FLIGHT)
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        grpc.channel_ready_future(self._channel).result(SECONDS)
        self._answers: Any = transport_pb2_grpc.WorkerServiceStub(self._channel).Stream(iter(self._queue.get, None))

    def barrier(self) -> Action:
        small = np.zeros(1, np.float32)
        return (lambda: self.send(small, 1)) if self.rank == 0 else (lambda: self.receive(small, 1))

    def send(self, array: Any, count: int) -> None:
        for number in range(count):
            message = transport_pb2.DataMessage()
            frame = message.frame
            frame.slot, frame.dtype, frame.total = int(number == count - 1), int(DType.FLOAT32), array.nbytes  # type: ignore[assignment]
            frame.shape.append(array.size)
            frame.payload = array.tobytes()
            self._queue.put(message, timeout=SECONDS)
        next(self._answers)

    def receive(self, array: Any, count: int) -> Any:
        return self._servicer.taken(count)

    def close(self) -> None:
        if self.rank == 0:
            self._queue.put(None)
            self._channel.close()
        else:
            self._server.stop(0)


class _Servicer(transport_pb2_grpc.WorkerServiceServicer):
    """Receives messages one by one, and answers those that ask for it."""

    def __init__(self) -> None:
        self._taken: queue.SimpleQueue[tuple[int, np.ndarray[Any, Any]]] = queue.SimpleQueue()

    def Stream(self, requests: Iterator[transport_pb2.DataMessage], context: Any) -> Iterator[transport_pb2.ControlMessage]:
        count = 0
        for message in requests:
            array = np.frombuffer(message.frame.payload, np.float32)
            count += 1
            if message.frame.slot:
                self._taken.put((count, array))
                yield transport_pb2.ControlMessage(opened=transport_pb2.Opened(generation=1))
                count = 0

    def taken(self, count: int) -> np.ndarray[Any, Any]:
        """Waits for the array that asked for an answer, and checks that it was number `count` since the last one that did."""
        found, array = self._taken.get(timeout=SECONDS)
        assert found == count, f"{found} arrays came for {count}"
        return array
