"""NCCL through nccl4py, NVIDIA's own binding: communicators that never block, split, and can be aborted.

Written against `nccl.bindings.nccl` of nccl4py 0.6: the functions of nccl.h in lower case on raw pointers. They take and return
`Comm` objects, raise `NCCLError` (with `.status`) for errors, and return normally for ncclInProgress.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from ferrorpc.backends.device.communicator import Communicator, DataType, Op, State, failed
from ferrorpc.backends.device.freeing import FREEING
from ferrorpc.backends.nccl.api import Features, NcclApi
from ferrorpc.errors import BackendUnavailableError, NcclError

MODULE: Final = "nccl.bindings.nccl"
NO_COLOR: Final = -1
"""NCCL_SPLIT_NOCOLOR."""
_STATES: Final = {int(state): state for state in State}


class Nccl4pyApi(NcclApi):
    """`NcclApi` on nccl4py.

    Args:
        bindings: the module `nccl.bindings.nccl`.
    """

    name = "nccl4py"

    def __init__(self, bindings: Any) -> None:
        self._nccl = bindings
        self.version = int(bindings.get_version())
        self.features = Features.of(self.version)

    def unique_id(self) -> bytes:
        return bytes(self.ask("ncclGetUniqueId", self._nccl.get_unique_id))

    def init(self, size: int, rank: int, unique_ids: Sequence[bytes]) -> Communicator:
        config = self.config()
        ids = bytearray(b"".join(unique_ids))
        call = "ncclCommInitRank"
        if self.features.scalable:
            made = self.ask(call, self._nccl.comm_init_rank_scalable, size, rank, len(unique_ids), ids, config.ptr)
        else:
            made = self.ask(call, self._nccl.comm_init_rank_config, size, ids, rank, config.ptr)
        return Nccl4pyCommunicator(self, self._nccl, made)

    def config(self) -> Any:
        """The configuration of communicators: non-blocking, and sharing nothing with those that are split from them.

        With `splitShare` they would share one stream and one abort flag on a device. Their kernels would then run in the order
        in which a rank launches them, a deadlock where two ranks launch operations of two groups in different orders;
        and to abort one would leave the others without a result and without an error (NCCL 2.28, enqueue.cc and init.cc).
        """
        config = self._nccl.Config()
        config.blocking = 0
        return config

    def ask(self, call: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function of the bindings. "In progress", which is no error here, gives None; errors are translated."""
        try:
            return function(*arguments)
        except self._nccl.NCCLError as error:
            return self.refused(call, error, str)

    def refused(self, call: str, error: Any, words: Callable[[], str]) -> None:
        """Raises the NcclError for an error of the bindings, with NCCL's own message if there is one; not for "in progress"."""
        if error.status != State.IN_PROGRESS:
            raise failed(call, error.status, words() or str(error)) from None


class Nccl4pyCommunicator(Communicator):
    """`Communicator` on nccl4py.

    An abort frees what another thread may be using. So each call holds a lock, never for long because none of them blocks; an
    abort waits for the call in progress and refuses later ones.
    """

    def __init__(self, api: Nccl4pyApi, bindings: Any, made: Any) -> None:
        self._api = api
        self._nccl = bindings
        self._comm = made
        self._lock = threading.RLock()
        self._is_gone = False
        self._splits: list[Any] = []
        """Keeps the objects into which NCCL writes the communicators of splits, at any later time."""

    def _ask(self, call: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """As `Nccl4pyApi.ask`, under the lock. `state` and `all_reduce` repeat its code, whose call would take as long."""
        with self._lock:
            if self._is_gone:
                raise self._gone_error(call)
            try:
                return function(*arguments)
            except self._nccl.NCCLError as error:
                return self._api.refused(call, error, self.last_error)

    def _gone_error(self, call: str) -> NcclError:
        return failed(call, State.INVALID_USAGE, "the communicator was aborted or destroyed")

    def _gone(self) -> bool:
        """Marks it as gone. Returns whether it was already."""
        with self._lock:
            before, self._is_gone = self._is_gone, True
        return before

    def state(self) -> State:
        with self._lock:
            if self._is_gone:
                raise self._gone_error("ncclCommGetAsyncError")
            try:
                return _STATES[self._nccl.comm_get_async_error(self._comm)]
            except self._nccl.NCCLError as error:
                self._api.refused("ncclCommGetAsyncError", error, self.last_error)
                return State.IN_PROGRESS

    def last_error(self) -> str:
        with self._lock:
            return "" if self._is_gone else str(self._nccl.get_last_error(self._comm)).strip()

    def grouped(self, calls: Callable[[], object]) -> None:
        """As `Communicator.grouped`. Not by `_ask`: an interrupt that came as its own code runs would leave the group open."""
        with self._lock:
            if self._is_gone:
                raise self._gone_error("ncclGroupStart")
            is_refused = False
            try:
                try:
                    self._nccl.group_start()
                except self._nccl.NCCLError as error:
                    is_refused = error.status != State.IN_PROGRESS
                    self._api.refused("ncclGroupStart", error, self.last_error)
                calls()
            finally:
                try:
                    if not is_refused:
                        self._nccl.group_end()
                except self._nccl.NCCLError as error:
                    self._api.refused("ncclGroupEnd", error, self.last_error)

    def all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        with self._lock:
            if self._is_gone:
                raise self._gone_error("ncclAllReduce")
            try:
                self._nccl.all_reduce(source, target, count, datatype, op, self._comm, stream)
            except self._nccl.NCCLError as error:
                self._api.refused("ncclAllReduce", error, self.last_error)

    def reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> None:
        self._ask("ncclReduce", self._nccl.reduce, source, target, count, datatype, op, root, self._comm, stream)

    def reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        self._ask("ncclReduceScatter", self._nccl.reduce_scatter, source, target, count, datatype, op, self._comm, stream)

    def broadcast(self, source: int, target: int, count: int, datatype: DataType, root: int, stream: int) -> None:
        self._ask("ncclBroadcast", self._nccl.broadcast, source, target, count, datatype, root, self._comm, stream)

    def all_gather(self, source: int, target: int, count: int, datatype: DataType, stream: int) -> None:
        self._ask("ncclAllGather", self._nccl.all_gather, source, target, count, datatype, self._comm, stream)

    def send(self, source: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self._ask("ncclSend", self._nccl.send, source, count, datatype, peer, self._comm, stream)

    def recv(self, target: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        self._ask("ncclRecv", self._nccl.recv, target, count, datatype, peer, self._comm, stream)

    def split(self, color: int | None, key: int) -> Communicator | None:
        config, part = self._api.config(), NO_COLOR if color is None else color
        made = self._ask("ncclCommSplit", self._nccl.comm_split, self._comm, part, key, config.ptr)
        self._splits.append(made)
        return None if color is None else Nccl4pyCommunicator(self._api, self._nccl, made)

    def abort(self) -> None:
        self._free("ncclCommAbort", self._nccl.comm_abort)

    def finalize(self) -> None:
        self._ask("ncclCommFinalize", self._nccl.comm_finalize, self._comm)

    def destroy(self) -> None:
        self._free("ncclCommDestroy", self._nccl.comm_destroy)

    def _free(self, call: str, function: Callable[..., Any]) -> None:
        with FREEING.begun() as may_run:
            if may_run and not self._gone():
                self._api.ask(call, function, self._comm)


def open_nccl4py() -> Nccl4pyApi:
    """Opens the binding.

    Raises:
        BackendUnavailableError: it is not installed, or its library cannot be loaded.
    """
    try:
        return Nccl4pyApi(importlib.import_module(MODULE))
    except Exception as problem:  # noqa: BLE001  the package loads libraries when first used, and fails in its own ways
        said = " ".join(str(problem).split())  # over several lines, where no library is found
        raise BackendUnavailableError(f"nccl4py: {type(problem).__name__}: {said}") from None
