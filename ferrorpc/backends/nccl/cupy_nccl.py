"""NCCL through `cupy.cuda.nccl`, where nccl4py is not installed. Prefer nccl4py.

CuPy's binding initialises a communicator by a call that returns only when all ranks have come. Here that call runs on a thread
of its own, so that its caller keeps its deadline. It cannot be aborted: the thread and its GPU memory stay until the process
ends. Other calls may wait for ranks as well. NCCL connects what a collective needs at its first call, unless it is told to do
so at the initialisation, as it is here. What sends and receives need it always connects at the first of them, so groups are
launched on a thread of their own. Written against CuPy 14.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from ferrorpc.backends.device.communicator import Communicator, DataType, Op, State, failed
from ferrorpc.backends.device.freeing import FREEING
from ferrorpc.backends.nccl.api import Features, NcclApi
from ferrorpc.errors import BackendUnavailableError, NcclError
from ferrorpc.guard import SYSTEM_CLOCK

MODULE: Final = "cupy.cuda.nccl"
_NO_COLOR: Final = -1
_CONNECT_LATER: Final = "NCCL_RUNTIME_CONNECT"


class CupyNcclApi(NcclApi):
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
        with self.refusals("ncclGetUniqueId"):
            return bytes(self.bindings.get_unique_id())

    def init(self, size: int, rank: int, unique_ids: Sequence[bytes]) -> Communicator:
        """As `NcclApi.init`; this binding takes one id only."""
        device = int(self._cupy.cuda.Device().id)
        make = partial(self.bindings.NcclCommunicator, size, unique_ids[0], rank)
        return CupyCommunicator(self, device, "ncclCommInitRank", make)

    def enter(self, device: int) -> None:
        """Makes a GPU the current device of the calling thread, which is one of this module's."""
        self._cupy.cuda.Device(device).use()

    @contextmanager
    def refusals(self, call: str) -> Iterator[None]:
        """Translates NCCL's errors. CuPy raises KeyError for those that its table lacks (in progress, timeout)."""
        try:
            yield
        except self.bindings.NcclError as error:
            raise failed(call, error.status, str(error)) from None
        except KeyError as missing:
            raise failed(call, int(missing.args[0]), "CuPy has no words for it") from None


class CupyCommunicator(Communicator):
    """`Communicator` on CuPy's binding, initialised on a thread of its own.

    An abort frees what another thread may be using, so it waits for the call in progress, however long that takes.
    """

    def __init__(self, api: CupyNcclApi, device: int, call: str, make: Callable[[], Any]) -> None:
        self._api = api
        self._device = device
        self._made: Any = None
        self._problem: NcclError | None = None
        self._is_over = False
        """Whether the thread has finished, even without a communicator, as after a split without a color."""
        self._splitting: CupyCommunicator | None = None
        self._lock = threading.RLock()
        """Held by each call."""
        self._group: list[Callable[[Any], object]] | None = None
        self._is_launching = False
        """Whether a thread is launching a group."""
        self._given_up = False
        SYSTEM_CLOCK.start(lambda: self._make(call, make), "ferrorpc-nccl-init")

    def _make(self, call: str, make: Callable[[], Any]) -> None:
        made = None
        try:
            self._api.enter(self._device)
            with self._api.refusals(call):
                made = make()
        except Exception as problem:  # noqa: BLE001  whatever it is, `state` has to tell it to the thread that waits
            self._problem = _told(call, problem)
        with self._lock:
            self._made, self._is_over, late = made, True, self._given_up
        if late and made is not None:
            self._abort()

    @property
    def _nccl(self) -> Any:
        """CuPy's communicator. Raises NcclError before it is complete and after an abort."""
        if self._made is None or self._given_up:
            raise failed("NCCL", State.INVALID_USAGE, "the communicator is not complete, or was aborted")
        return self._made

    def _call(self, name: str, call: Callable[[Any], object]) -> None:
        """Makes one call on the communicator, now or with its group."""
        if self._group is not None:
            self._group.append(call)
            return
        with self._lock, self._api.refusals(name):
            call(self._nccl)

    def state(self) -> State:
        """As `Communicator.state`. IN_PROGRESS also while another thread's call waits."""
        is_launching = self._is_launching  # the flags first: other threads set them after the problem
        for each in (self, self._splitting):
            if each is None:
                continue
            is_over = each._is_over
            if each._problem is not None:
                raise each._problem.again()
            if not is_over:
                return State.IN_PROGRESS
        if is_launching or not self._lock.acquire(blocking=False):
            return State.IN_PROGRESS
        try:
            with self._api.refusals("ncclCommGetAsyncError"):
                self._nccl.check_async_error()
        finally:
            self._lock.release()
        return State.SUCCESS

    def last_error(self) -> str:
        """CuPy's binding has no such call."""
        return ""

    def all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self._call("ncclAllReduce", lambda nccl: nccl.allReduce(source, target, count, int(datatype), int(op), stream))

    def reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> None:
        self._call("ncclReduce", lambda nccl: nccl.reduce(source, target, count, int(datatype), int(op), root, stream))

    def reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self._call("ncclReduceScatter", lambda nccl: nccl.reduceScatter(source, target, count, int(datatype), int(op), stream))

    def broadcast(self, source: int, target: int, count: int, datatype: DataType, root: int, stream: int) -> None:
        self._call("ncclBroadcast", lambda nccl: nccl.broadcast(source, target, count, int(datatype), root, stream))

    def all_gather(self, source: int, target: int, count: int, datatype: DataType, stream: int) -> None:
        self._call("ncclAllGather", lambda nccl: nccl.allGather(source, target, count, int(datatype), stream))

    def send(self, source: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self._call("ncclSend", lambda nccl: nccl.send(source, count, int(datatype), peer, stream))

    def recv(self, target: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self._call("ncclRecv", lambda nccl: nccl.recv(target, count, int(datatype), peer, stream))

    def grouped(self, calls: Callable[[], object]) -> None:
        """As `Communicator.grouped`. Another thread launches them, because they may wait for other ranks."""
        group = self._group = list[Callable[[Any], object]]()
        try:
            calls()
        finally:
            self._group = None
        self._is_launching = True
        SYSTEM_CLOCK.start(lambda: self._launch(group), "ferrorpc-nccl-group")

    def _launch(self, calls: Sequence[Callable[[Any], object]]) -> None:
        bindings = self._api.bindings
        try:
            self._api.enter(self._device)
            with self._lock, self._api.refusals("ncclGroupEnd"):
                nccl = self._nccl
                bindings.groupStart()
                try:
                    for call in calls:
                        call(nccl)
                finally:
                    bindings.groupEnd()
        except Exception as problem:  # noqa: BLE001  as in `_make`
            self._problem = _told("ncclGroupEnd", problem)
        finally:
            self._is_launching = False

    def split(self, color: int | None, key: int) -> Communicator | None:
        """As `Communicator.split`; on a thread of its own, because the call waits for all ranks."""

        def divide() -> Any:
            with self._lock:
                return self._nccl.commSplit(_NO_COLOR if color is None else color, key)

        self._splitting = CupyCommunicator(self._api, self._device, "ncclCommSplit", divide)
        return None if color is None else self._splitting

    def abort(self) -> None:
        """As `Communicator.abort`; one that is not complete is aborted once it is."""
        with self._lock:
            mine = self._made is not None and not self._given_up
            self._given_up = True
        if mine:
            self._abort()

    def _abort(self) -> None:
        with FREEING.begun() as may_run, self._api.refusals("ncclCommAbort"):
            if may_run:
                self._made.abort()

    def finalize(self) -> None:
        """CuPy's binding has no such call."""

    def destroy(self) -> None:
        """As `Communicator.destroy`, by an abort, because this binding's own call waits for the other ranks without bound.
        Nothing is in flight by then, and CuPy's finalizer, which would wait too, finds nothing to destroy."""
        self.abort()


def _told(call: str, problem: Exception) -> NcclError:
    """The error of a call that failed on a thread of its own."""
    return problem if isinstance(problem, NcclError) else failed(call, State.INTERNAL_ERROR, repr(problem))


def open_cupy_nccl() -> CupyNcclApi:
    """Opens the binding.

    Raises:
        BackendUnavailableError: CuPy or its NCCL is not installed.
    """
    try:
        cupy, bindings = importlib.import_module("cupy"), importlib.import_module(MODULE)
    except ImportError as missing:
        raise BackendUnavailableError(f"cupy.cuda.nccl: {missing}") from None
    if not getattr(bindings, "available", False):
        raise BackendUnavailableError("cupy.cuda.nccl: CuPy found no libnccl")
    os.environ.setdefault(_CONNECT_LATER, "0")
    return CupyNcclApi(cupy, bindings)
