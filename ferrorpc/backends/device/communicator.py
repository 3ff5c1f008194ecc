"""What a backend for GPU arrays asks of a communicator: the interface of NCCL's, which the CUDA IPC communicator has too.

Pointers are device addresses and `stream` is a CUDA stream, both as integers. No call blocks the host for another rank. While
a communicator is incomplete, or an operation is not yet launched, its `state` is IN_PROGRESS, and nothing else may be asked
of it until that changes. Errors are NcclError with the field `status`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, unique
from typing import Final, Protocol, TypeAlias

from ferrorpc.errors import NcclError, TensorMismatchError
from ferrorpc.types import DType, ReduceOp, refusal


@unique
class State(IntEnum):
    """ncclResult_t."""

    SUCCESS = 0
    UNHANDLED_CUDA_ERROR = 1
    SYSTEM_ERROR = 2
    INTERNAL_ERROR = 3
    INVALID_ARGUMENT = 4
    INVALID_USAGE = 5
    REMOTE_ERROR = 6
    IN_PROGRESS = 7
    TIMEOUT = 8


@unique
class DataType(IntEnum):
    """ncclDataType_t, without the eight-bit floats."""

    INT8 = 0
    UINT8 = 1
    INT32 = 2
    UINT32 = 3
    INT64 = 4
    UINT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9


@unique
class Op(IntEnum):
    """ncclRedOp_t."""

    SUM = 0
    PRODUCT = 1
    MAX = 2
    MIN = 3
    MEAN = 4


class Communicator(Protocol):
    """One rank's end of a communicator."""

    def state(self) -> State:
        """ncclCommGetAsyncError: IN_PROGRESS, SUCCESS, or the error it has met in the background."""

    def last_error(self) -> str:
        """NCCL's own words on what happened last; empty where the binding cannot ask."""

    def all_reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        """ncclAllReduce."""

    def reduce(self, source: int, target: int, count: int, datatype: DataType, op: Op, root: int, stream: int) -> None:
        """ncclReduce."""

    def reduce_scatter(self, source: int, target: int, count: int, datatype: DataType, op: Op, stream: int) -> None:
        """ncclReduceScatter; `count` is that of a rank's part."""

    def broadcast(self, source: int, target: int, count: int, datatype: DataType, root: int, stream: int) -> None:
        """ncclBroadcast."""

    def all_gather(self, source: int, target: int, count: int, datatype: DataType, stream: int) -> None:
        """ncclAllGather; `count` is that of a rank's part."""

    def send(self, source: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        """ncclSend."""

    def recv(self, target: int, count: int, datatype: DataType, peer: int, stream: int) -> None:
        """ncclRecv."""

    def grouped(self, calls: Callable[[], object]) -> None:
        """ncclGroupStart and ncclGroupEnd: what `calls` asks of this communicator is launched as one.

        No context manager, whose own steps an interrupt could strike between the two.
        """

    def split(self, color: int | None, key: int) -> Communicator | None:
        """ncclCommSplit, in which all ranks take part: a communicator for each color, ordered by key; None without a color.

        This one's state is IN_PROGRESS until all ranks have come. The new one is none before that: nothing may be asked of it.
        """

    def abort(self) -> None:
        """ncclCommAbort: ends what is in flight and frees it. May block; NCCL's own bugs have made it block for ever.

        From any thread, whatever others ask meanwhile: from then on that is INVALID_USAGE.
        """

    def finalize(self) -> None:
        """ncclCommFinalize: no more operations will come. Then the state is IN_PROGRESS until all have ended."""

    def destroy(self) -> None:
        """ncclCommDestroy, after `finalize`."""


Split: TypeAlias = Callable[[Communicator, str, Sequence[int], int | None], Communicator | None]
"""split(parent, label, ranks, group_rank): a communicator of some of the parent's ranks, which are given as world ranks. All of
the parent's ranks call it; `group_rank` is a rank's number in the part. Those outside pass None, and get None."""


class Connector(Protocol):
    """Makes communicators and waits until they are complete.

    Attributes:
        library: whose communicators these are, for messages: "NCCL" or "CUDA IPC".
        waits_on_gpu: whether what is launched waits on the GPU until the other ranks have launched it too.
        explanation: how its communicators move arrays, in words that complete "all_reduce(...) on 4 ranks: ".
    """

    library: str
    waits_on_gpu: bool
    explanation: str

    def connect(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A new communicator of these world ranks, in their order. Raises NcclError if it cannot be made."""

    @property
    def split(self) -> Split | None:
        """Makes communicators from others; None where the ranks of a part `connect` instead."""


NAMES: Final = {
    DType.BOOL: DataType.UINT8,
    DType.INT8: DataType.INT8,
    DType.INT32: DataType.INT32,
    DType.INT64: DataType.INT64,
    DType.UINT8: DataType.UINT8,
    DType.UINT32: DataType.UINT32,
    DType.UINT64: DataType.UINT64,
    DType.FLOAT16: DataType.FLOAT16,
    DType.BFLOAT16: DataType.BFLOAT16,
    DType.FLOAT32: DataType.FLOAT32,
    DType.FLOAT64: DataType.FLOAT64,
    DType.COMPLEX64: DataType.FLOAT32,
    DType.COMPLEX128: DataType.FLOAT64,
}
"""The elements that a communicator sees: bool is bytes of 0 and 1, a complex number is two floats."""
_OPS: Final = {
    ReduceOp.SUM: Op.SUM,
    ReduceOp.MEAN: Op.MEAN,
    ReduceOp.PRODUCT: Op.PRODUCT,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
}
_LOGICAL: Final = {
    ReduceOp.SUM: Op.MAX,
    ReduceOp.PRODUCT: Op.MIN,
    ReduceOp.MIN: Op.MIN,
    ReduceOp.MAX: Op.MAX,
    ReduceOp.BAND: Op.MIN,
    ReduceOp.BOR: Op.MAX,
}
"""For bool: SUM is a logical or, PRODUCT a logical and."""
_OF_PAIRS: Final = (ReduceOp.SUM, ReduceOp.MEAN)
"""The operators that treat the two floats of a complex number separately."""


def reduction(op: ReduceOp, dtype: DType) -> tuple[Op, DataType, int] | None:
    """The communicator's operator and element type, and how many of its elements one of ours is; None where it has none."""
    if dtype not in NAMES:
        return None
    table = _LOGICAL if dtype is DType.BOOL else _OPS
    if op not in table or (dtype.is_complex and op not in _OF_PAIRS):
        return None
    return table[op], NAMES[dtype], 2 if dtype.is_complex else 1


def required(op: ReduceOp, dtype: DType, library: str, size: int) -> tuple[Op, DataType, int]:
    """As `reduction`. The mean of one rank is its sum: NCCL's own leaves the end of long arrays unwritten there.

    Args:
        library: as in `Connector`.
        size: how many ranks there are.

    Raises:
        TensorMismatchError: the operator means nothing for the dtype, or the library lacks it; the message says which.
    """
    why_not = refusal(op, dtype)
    found = None if why_not else reduction(op, dtype)
    if found is not None and size == 1 and found[0] is Op.MEAN:
        found = (Op.SUM, *found[1:])
    if found is None:
        raise TensorMismatchError(
            why_not.reason if why_not else f"{library} has no op={op.value!r} for {dtype.label}",
            hint="with backend='hybrid' or 'cuda_ipc' arrays are reduced through the host then; or convert the array",
        )
    return found


def failed(call: str, status: int, words: str) -> NcclError:
    """The error of a call that a communicator refused.

    Args:
        call: such as "ncclAllReduce".
        words: the library's own message, or "".
    """
    name = State(status).name.lower().replace("_", " ") if status in State._value2member_map_ else f"status {status}"
    return NcclError(f"{call}: {name}" + (f" ({words})" if words else ""), status=int(status))
