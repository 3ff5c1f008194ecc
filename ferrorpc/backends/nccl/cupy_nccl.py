"""NCCL through `cupy.cuda.nccl`: for where nccl4py is not installed.

CuPy's binding makes communicators only by a call that returns when all ranks have come, or never. Here that call has a thread
of its own, so that its caller keeps its deadline; but it cannot be aborted, and the thread and its GPU memory stay until the
process ends. Use nccl4py where you can. Written against CuPy 14; without a GPU its version and its ids were tried against the
real package, everything else against stand-ins.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from ferrorpc.backends.nccl.api import Communicator, DataType, Features, Op, State, failed
from ferrorpc.errors import BackendUnavailableError, NcclError
from ferrorpc.guard import SYSTEM_CLOCK

MODULE: Final = "cupy.cuda.nccl"
_NO_COLOR: Final = -1


class CupyNcclApi:
    """`NcclApi` on CuPy's binding.

    Args:
        cupy: the module `cupy`.
        bindings: the module `cupy.cuda.nccl`.
    """

    name = MODULE

    def __init__(self, cupy: Any, bindings: Any) -> None:
        self._cupy = cupy
        self.bindings = bindings
        self.version = int(bindings.get_version())
        self.features = Features.of(self.version, non_blocking=False)

    def unique_id(self) -> bytes:
        """As `NcclApi.unique_id`."""
        with self.refusals("ncclGetUniqueId"):
            return bytes(self.bindings.get_unique_id())

    def init(self, size: int, rank: int, unique_ids: Sequence[bytes]) -> Communicator:
        """As `NcclApi.init`; several ids are more than this binding takes."""
        device = int(self._cupy.cuda.Device().id)
        return CupyCommunicator(self, device, lambda: self.bindings.NcclCommunicator(size, unique_ids[0], rank))

    def on(self, device: int) -> Any:
        """A context in which a GPU is the calling thread's current device."""
        return self._cupy.cuda.Device(device)

    @contextmanager
    def refusals(self, call: str) -> Iterator[None]:
        """Translates NCCL's errors. For those that CuPy's table lacks (in progress, timeout) it raises KeyError."""
        try:
            yield
        except self.bindings.NcclError as error:
            raise failed(call, error.status, str(error)) from None
        except KeyError as missing:
            raise failed(call, int(missing.args[0]), "CuPy has no words for it") from None


class CupyCommunicator:
    """`Communicator` on CuPy's binding, which a thread of its own makes."""

    def __init__(self, api: CupyNcclApi, device: int, make: Callable[[], Any]) -> None:
        self._api = api
        self._device = device
        self._made: Any = None
        self._problem: NcclError | None = None
        self._is_over = False
        """Whether the thread is through, also where it made none, as by a split without a color."""
        self._splitting: CupyCommunicator | None = None
        self._lock = threading.Lock()
        """Held while the state is asked for: an abort frees what that looks at."""
        self._given_up = False
        SYSTEM_CLOCK.start(lambda: self._make(make), "ferrorpc-nccl-init")

    def _make(self, make: Callable[[], Any]) -> None:
        made = None
        try:
            with self._api.on(self._device), self._api.refusals("ncclCommInitRank"):
                made = make()
        except NcclError as problem:
            self._problem = problem
        with self._lock:
            self._made, self._is_over, late = made, True, self._given_up
        if late and made is not None:
            self._abort()

    @property
    def _nccl(self) -> Any:
        """The communicator; there is one once its state was SUCCESS, until it is given up."""
        if self._made is None or self._given_up:
            raise failed("NCCL", State.INVALID_USAGE, "the communicator is not complete, or was aborted")
        return self._made

    def state(self) -> State:
        """As `Communicator.state`."""
        if self._problem is not None:
            raise self._problem.again()
        if not self._is_over or (self._splitting is not None and not self._splitting._is_over):
            return State.IN_PROGRESS
        with self._lock, self._api.refusals("ncclCommGetAsyncError"):
            self._nccl.check_async_error()
        return State.SUCCESS

    def last_error(self) -> str:
        """CuPy's binding does not ask."""
        return ""

    def all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        """As `Communicator.all_reduce`."""
        with self._api.refusals("ncclAllReduce"):
            self._nccl.allReduce(source, target, count, int(datatype), int(op), stream)

    def reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> None:
        """As `Communicator.reduce`."""
        with self._api.refusals("ncclReduce"):
            self._nccl.reduce(source, target, count, int(datatype), int(op), root, stream)

    def reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        """As `Communicator.reduce_scatter`."""
        with self._api.refusals("ncclReduceScatter"):
            self._nccl.reduceScatter(source, target, count, int(datatype), int(op), stream)

    def broadcast(self, source: int, target: int, count: int, datatype: DataType, root: int, stream: int) -> None:
        """As `Communicator.broadcast`."""
        with self._api.refusals("ncclBroadcast"):
            self._nccl.broadcast(source, target, count, int(datatype), root, stream)

    def all_gather(self, source: int, target: int, count: int, datatype: DataType, stream: int) -> None:
        """As `Communicator.all_gather`."""
        with self._api.refusals("ncclAllGather"):
            self._nccl.allGather(source, target, count, int(datatype), stream)

    def send(self, source: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        """As `Communicator.send`."""
        with self._api.refusals("ncclSend"):
            self._nccl.send(source, count, int(datatype), peer, stream)

    def recv(self, target: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        """As `Communicator.recv`."""
        with self._api.refusals("ncclRecv"):
            self._nccl.recv(target, count, int(datatype), peer, stream)

    @contextmanager
    def grouped(self) -> Iterator[None]:
        """As `Communicator.grouped`."""
        with self._api.refusals("ncclGroupStart"):
            self._api.bindings.groupStart()
        try:
            yield
        finally:
            with self._api.refusals("ncclGroupEnd"):
                self._api.bindings.groupEnd()

    def split(self, color: int | None, key: int) -> Communicator | None:
        """As `Communicator.split`; the call waits for all ranks, on a thread of its own."""
        self._splitting = CupyCommunicator(
            self._api, self._device, lambda: self._nccl.commSplit(_NO_COLOR if color is None else color, key)
        )
        return None if color is None else self._splitting

    def abort(self) -> None:
        """As `Communicator.abort`; one that is not complete is aborted once it is."""
        with self._lock:
            mine = self._made is not None and not self._given_up
            self._given_up = True
        if mine:
            self._abort()

    def _abort(self) -> None:
        with self._api.refusals("ncclCommAbort"):
            self._made.abort()

    def finalize(self) -> None:
        """CuPy's binding has no such call."""

    def destroy(self) -> None:
        """As `Communicator.destroy`, by an abort: this binding's own waits for the other ranks, without bound. Nothing is in
        flight then, and CuPy's finalizer, which would wait too, finds nothing to destroy."""
        self.abort()


def open_cupy_nccl() -> CupyNcclApi:
    """The binding, where CuPy and its NCCL are installed.

    Raises:
        BackendUnavailableError: one of them is not.
    """
    try:
        cupy, bindings = importlib.import_module("cupy"), importlib.import_module(MODULE)
    except ImportError as missing:
        raise BackendUnavailableError(f"cupy.cuda.nccl: {missing}") from None
    if not getattr(bindings, "available", False):
        raise BackendUnavailableError("cupy.cuda.nccl: CuPy found no libnccl")
    return CupyNcclApi(cupy, bindings)
