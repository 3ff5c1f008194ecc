"""All errors that ferrorpc raises.

    FerroError                               .code .retryable .fields; the last line of str() begins "try:"
    ├─ ConfigError (ValueError)              an option, variable or flag is wrong
    ├─ UsageError                            the call is wrong; nothing was sent, the group stays open
    │  ├─ InvalidRankError  InvalidWorldSizeError  SelfSendError
    │  ├─ TensorMismatchError                dtype, shape, kind or op do not fit together
    │  └─ GroupClosedError
    ├─ RendezvousTimeoutError (TimeoutError) .missing
    ├─ CollectiveTimeoutError (TimeoutError) .waiting_on
    │  └─ BarrierTimeoutError                .missing
    ├─ StoreTimeoutError (TimeoutError)
    ├─ CoordinatorUnavailableError *         no coordinator answers at that address
    ├─ StaleGenerationError *                fenced: the membership moved on without this caller
    ├─ PeerLostError *                       .rank .reason
    ├─ CollectiveMismatchError               .signatures
    ├─ GroupAbortedError *                   .rank .cause
    ├─ LimitExceededError
    │  └─ MessageTooLargeError
    ├─ CodecError                            bytes that are not a valid message
    ├─ AuthenticationError  PermissionDeniedError  VersionMismatchError
    ├─ BackendUnavailableError               .reason .hint
    └─ NcclError

(* retryable by default: a new attempt, or `group.reform()`, can succeed.)

An error consists of code, message, hint and fields. These are sent over the wire (`wire/status.py`), and `FerroError.restore`
makes an error of the same class from them. Ranks are world ranks.
"""

from __future__ import annotations

import copyreg
import sys
from collections.abc import Iterable, Mapping
from enum import IntEnum, unique
from operator import index
from typing import Any, ClassVar

from ferrorpc.tracebacks import shortened


@unique
class ErrorCode(IntEnum):
    """The codes on the wire. `protos/ferrorpc/v1/error.proto` has the same list (a test compares them)."""

    INTERNAL = 1
    CONFIG = 2
    USAGE = 3
    INVALID_RANK = 4
    INVALID_WORLD_SIZE = 5
    SELF_SEND = 6
    TENSOR_MISMATCH = 7
    GROUP_CLOSED = 8
    RENDEZVOUS_TIMEOUT = 9
    BARRIER_TIMEOUT = 10
    STORE_TIMEOUT = 11
    COLLECTIVE_TIMEOUT = 12
    COORDINATOR_UNAVAILABLE = 13
    STALE_GENERATION = 14
    PEER_LOST = 15
    COLLECTIVE_MISMATCH = 16
    GROUP_ABORTED = 17
    LIMIT_EXCEEDED = 18
    MESSAGE_TOO_LARGE = 19
    CODEC = 20
    AUTHENTICATION = 21
    PERMISSION_DENIED = 22
    VERSION_MISMATCH = 23
    BACKEND_UNAVAILABLE = 24
    NCCL = 25


type_of: dict[ErrorCode, type[FerroError]] = {}
"""The class of each code. Every class of this module adds itself."""


class FerroError(Exception):
    """The base of all errors. An instance of this class itself (code INTERNAL) is a bug in ferrorpc.

    Args:
        message: what happened.
        hint: what to try; None for the class's default.
        retryable: whether a new attempt can succeed; None for the class's default.
        fields: typed facts (int, float, str, bool, list of int or str, dict of int to str).
    """

    code: ClassVar[ErrorCode] = ErrorCode.INTERNAL
    default_hint: ClassVar[str] = "report this as a bug in ferrorpc, with the lines above"
    default_retryable: ClassVar[bool] = False

    message: str
    hint: str
    retryable: bool
    fields: dict[str, Any]
    _shown: list[bool]
    """Whether the caller has seen this error. A list that copies share: sharing the error would keep its frames."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.__module__ == __name__:  # others, of callers, inherit their code
            type_of[cls.code] = cls

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool | None = None, **fields: Any) -> None:
        self._fill(message, hint, retryable, fields)

    def _fill(self, message: str, hint: str | None, retryable: bool | None, fields: Mapping[str, Any]) -> None:
        self.message = message
        self.hint = self.default_hint if hint is None else hint
        self.retryable = self.default_retryable if retryable is None else retryable
        self.fields = dict(fields)
        self._shown = [False]
        self._set_text()

    def _set_text(self) -> None:
        super().__init__(f"{self.message}\ntry: {self.hint}")

    @classmethod
    def restore(cls, code: int, message: str, hint: str, retryable: bool, fields: Mapping[str, Any]) -> FerroError:
        """Makes an error that was raised elsewhere. An unknown code, of a newer peer, gives the base class."""
        known = code in ErrorCode._value2member_map_
        chosen = type_of.get(ErrorCode(code), FerroError) if known else FerroError
        error = chosen.__new__(chosen)
        FerroError._fill(error, message, hint, retryable, fields)
        return error

    def again(self, hint: str | None = None) -> FerroError:
        """A copy to raise: one cause that is raised in several threads must not share a traceback.

        Args:
            hint: another hint, if the error's own does not fit the caller.
        """
        copy = type(self).__new__(type(self))
        vars(copy).update(vars(self), __notes__=[*getattr(self, "__notes__", ())])  # a list of its own
        FerroError._fill(copy, self.message, self.hint if hint is None else hint, self.retryable, self.fields)
        copy._shown = self._shown
        return copy

    def mark_shown(self) -> bool:
        """Notes that the caller has seen this error or a copy of it. Returns whether that is the first time."""
        was_shown, self._shown[0] = self._shown[0], True
        return not was_shown

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        vars(self).update(state or {})
        self._set_text()  # a TimeoutError does not keep what it is made with

    def __reduce__(self) -> tuple[Any, ...]:
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]  # what object's own returns

    def _render_traceback_(self) -> list[str]:
        """What IPython and Jupyter show of this error: they look for this method, and call no sys.excepthook."""
        shell = sys.modules["IPython"].get_ipython()
        with shortened(self, FerroError):
            return list(shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__))

    @property
    def group_rank(self) -> int | None:
        """For an error of a subgroup that has a `rank`: that member's rank within the subgroup; else None."""
        return _integer(self.fields.get("group_rank"))


class ConfigError(FerroError, ValueError):
    """An option, an environment variable or a flag is wrong. Exit code 64 unless it is retryable."""

    code = ErrorCode.CONFIG
    default_hint = "run `ferrorpc config` to see every value and where it came from"


class UsageError(FerroError):
    """The call is wrong. Nothing was sent, and the group stays open."""

    code = ErrorCode.USAGE
    default_hint = "see the docstring of the function that was called"


class InvalidRankError(UsageError):
    """A rank outside the group."""

    code = ErrorCode.INVALID_RANK
    default_hint = "ranks go from 0 to group.size - 1"


class InvalidWorldSizeError(UsageError):
    """An impossible world size."""

    code = ErrorCode.INVALID_WORLD_SIZE
    default_hint = "give a world size of at least 1, or MIN:MAX with 1 <= MIN <= MAX"


class SelfSendError(UsageError):
    """A send to, or a receive from, the caller's own rank."""

    code = ErrorCode.SELF_SEND
    default_hint = "copy the array instead; send and recv are for two different ranks"


class TensorMismatchError(UsageError):
    """Dtype, shape, kind or operation do not fit together on this rank."""

    code = ErrorCode.TENSOR_MISMATCH
    default_hint = "make dtype and shape agree; `out` must match the result exactly"


class GroupClosedError(UsageError):
    """An operation on a group after close()."""

    code = ErrorCode.GROUP_CLOSED
    default_hint = "call ferrorpc.init_process_group() again, or move close() after the last operation"


class RendezvousTimeoutError(FerroError, TimeoutError):
    """The rendezvous was not complete in time. `missing`: the ranks that did not come."""

    code = ErrorCode.RENDEZVOUS_TIMEOUT
    default_hint = "look at the logs of the missing ranks, or raise FERRORPC_TIMEOUT"

    def __init__(self, missing: Iterable[Any], message: str | None = None, **more: Any) -> None:
        absent = list(missing)
        super().__init__(f"these did not come in time: {absent}" if message is None else message, missing=absent, **more)

    @property
    def missing(self) -> list[Any]:
        """The ranks that did not come; names for members that had no rank yet."""
        return _list(self.fields.get("missing"))


class CollectiveTimeoutError(FerroError, TimeoutError):
    """An operation's deadline passed on this rank. `waiting_on`: world ranks it still waited for."""

    code = ErrorCode.COLLECTIVE_TIMEOUT
    default_hint = "look at what the ranks named above are doing (`ferrorpc status`), or raise FERRORPC_TIMEOUT or timeout="

    def __init__(self, waiting_on: Iterable[int], message: str | None = None, **more: Any) -> None:
        ranks = sorted(waiting_on)
        super().__init__(f"ranks {ranks} did not come in time" if message is None else message, waiting_on=ranks, **more)

    @property
    def waiting_on(self) -> list[int]:
        """World ranks that this rank still waited for."""
        return _integers(self.fields.get("waiting_on"))


class BarrierTimeoutError(CollectiveTimeoutError):
    """A barrier's deadline passed. `missing`: the ranks that never arrived."""

    code = ErrorCode.BARRIER_TIMEOUT
    default_hint = "look at the logs of the missing ranks, or raise the barrier's timeout"

    def __init__(self, missing: Iterable[int], message: str | None = None, **more: Any) -> None:
        ranks = sorted(missing)
        super().__init__(ranks, message, missing=ranks, **more)

    @property
    def missing(self) -> list[int]:
        """World ranks that never arrived."""
        return _integers(self.fields.get("missing"))


class StoreTimeoutError(FerroError, TimeoutError):
    """A wait on the store passed its deadline, or the coordinator did not answer in time; then a write may have happened."""

    code = ErrorCode.STORE_TIMEOUT
    default_hint = "check that another rank sets this key, and its spelling; or pass a larger timeout="


class CoordinatorUnavailableError(FerroError):
    """No coordinator answers at its address, or it was unreachable for longer than FERRORPC_MAX_OUTAGE."""

    code = ErrorCode.COORDINATOR_UNAVAILABLE
    default_hint = "check FERRORPC_COORDINATOR and `ferrorpc health --addr HOST:PORT`"
    default_retryable = True


class StaleGenerationError(FerroError):
    """The caller is not a member of the newest generation (it was fenced). Nothing was applied."""

    code = ErrorCode.STALE_GENERATION
    default_hint = "close() the group, then join again with ferrorpc.init_process_group(): its last generation is over"
    default_retryable = True


class PeerLostError(FerroError):
    """A member died or left while it was still needed."""

    code = ErrorCode.PEER_LOST
    default_hint = "call group.reform() to go on without it or with its replacement"
    default_retryable = True

    def __init__(self, rank: int, reason: str, message: str | None = None, **more: Any) -> None:
        text = f"rank {rank} was lost: {reason}" if message is None else message
        super().__init__(text, rank=rank, reason=reason, **more)

    @property
    def rank(self) -> int:
        """World rank of the lost member; -1 if the report named none."""
        rank = _integer(self.fields.get("rank"))
        return -1 if rank is None else rank

    @property
    def reason(self) -> str:
        """Why it is lost: an exit code, a signal, an exception or an expired lease."""
        return str(self.fields.get("reason", self.message))


class CollectiveMismatchError(FerroError):
    """Ranks called different operations in one place. `signatures`: world rank -> what that rank called."""

    code = ErrorCode.COLLECTIVE_MISMATCH
    default_hint = "make every rank call the same operations in the same order with the same shapes, then group.reform()"

    def __init__(self, signatures: Mapping[int, str], message: str | None = None, **more: Any) -> None:
        lines = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(signatures.items()))
        super().__init__(message or f"ranks disagree about one operation: {lines}", signatures=dict(signatures), **more)

    @property
    def signatures(self) -> dict[int, str]:
        """World rank -> the signature of its call."""
        found = self.fields.get("signatures")
        return {int(rank): str(text) for rank, text in found.items()} if isinstance(found, dict) else {}


class GroupAbortedError(FerroError):
    """`abort`, or an error on one rank, ended the generation. `rank` is that rank, `cause` its reason."""

    code = ErrorCode.GROUP_ABORTED
    default_hint = "look at the log of the rank named above; group.reform() makes a new generation"
    default_retryable = True

    def __init__(self, rank: int, cause: str, **more: Any) -> None:
        super().__init__(f"rank {rank} ended the group: {cause}", rank=rank, cause=cause, **more)

    @property
    def rank(self) -> int:
        """World rank that ended the generation; -1 if the report named none."""
        rank = _integer(self.fields.get("rank"))
        return -1 if rank is None else rank

    @property
    def cause(self) -> str:
        """Why it ended the generation."""
        return str(self.fields.get("cause", self.message))


class LimitExceededError(FerroError):
    """The request exceeds a limit and was not applied."""

    code = ErrorCode.LIMIT_EXCEEDED
    default_hint = "stay below the limit named above; docs/operations.md lists them all"


class MessageTooLargeError(LimitExceededError):
    """A value, a payload or a frame larger than a coordinator takes."""

    code = ErrorCode.MESSAGE_TOO_LARGE
    default_hint = "send arrays with group operations (they are cut in chunks); the store is for small values"


class CodecError(FerroError):
    """Bytes that are not a valid message. Nothing was allocated for them."""

    code = ErrorCode.CODEC
    default_hint = "check that every process runs the same ferrorpc version and that nothing else talks to this port"


class AuthenticationError(FerroError):
    """The peer could not prove its identity."""

    code = ErrorCode.AUTHENTICATION
    default_hint = "check FERRORPC_TOKEN_FILE and the FERRORPC_TLS_* variables on both sides"


class PermissionDeniedError(FerroError):
    """The peer is authenticated but may not do this."""

    code = ErrorCode.PERMISSION_DENIED
    default_hint = "use a token or certificate of a role that may do this"


class VersionMismatchError(FerroError):
    """The two sides speak different versions of the protocol."""

    code = ErrorCode.VERSION_MISMATCH
    default_hint = "install the same ferrorpc version everywhere"


class BackendUnavailableError(FerroError):
    """A backend, or a package that a feature needs, is not available here."""

    code = ErrorCode.BACKEND_UNAVAILABLE
    default_hint = "choose another backend, or install what is named above"

    def __init__(self, reason: str, hint: str | None = None, **more: Any) -> None:
        super().__init__(reason, hint=hint, reason=reason, **more)

    @property
    def reason(self) -> str:
        """Why it is not available."""
        return str(self.fields.get("reason", self.message))


class NcclError(FerroError):
    """NCCL reported an error."""

    code = ErrorCode.NCCL
    default_hint = "run with NCCL_DEBUG=INFO and look at the first warning of the rank named above"


def require(what: str, amount: int, limit: str, most: int, error: type[LimitExceededError] = LimitExceededError) -> None:
    """Checks an amount against a limit. Client and coordinator use it, so that both give the same message.

    Raises:
        LimitExceededError: `amount` is above `most`; or the class given as `error`.
    """
    if amount > most:
        raise error(f"{what} would be {amount}, the limit {limit} is {most}", limit=limit, most=most)


def _integer(value: Any) -> int | None:
    """A field that is an integer. None for anything else, which a report from another process may contain in its place."""
    try:
        return index(value)
    except TypeError:
        return None


def _list(value: Any) -> list[Any]:
    """A field that is a list; an empty one for anything else."""
    return list(value) if isinstance(value, list) else []


def _integers(value: Any) -> list[int]:
    """The integers in a field that is a list."""
    return [rank for rank in map(_integer, _list(value)) if rank is not None]


type_of[ErrorCode.INTERNAL] = FerroError

__all__ = [
    "ErrorCode",
    "ConfigError",
    "UsageError",
    "InvalidRankError",
    "InvalidWorldSizeError",
    "SelfSendError",
    "TensorMismatchError",
    "GroupClosedError",
    "RendezvousTimeoutError",
    "CollectiveTimeoutError",
    "BarrierTimeoutError",
    "StoreTimeoutError",
    "CoordinatorUnavailableError",
    "StaleGenerationError",
    "PeerLostError",
    "CollectiveMismatchError",
    "GroupAbortedError",
    "LimitExceededError",
    "MessageTooLargeError",
    "CodecError",
    "AuthenticationError",
    "PermissionDeniedError",
    "VersionMismatchError",
    "BackendUnavailableError",
    "NcclError",
    "FerroError",
]
