"""Events: the only input of `Coordinator.step`.

Streams and calls are numbered by the driver, which never uses a number twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ferrorpc.v1 import session_pb2 as session
from ferrorpc.wire.identity import Identity

UnaryRequest = session.StatusRequest | session.UnaryStoreRequest | session.UnaryBarrierRequest | session.UnaryReportRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer of a connection."""

    address: str = ""
    identities: frozenset[Identity] | None = None
    """The identities in its certificate; None if it sent none."""


UNKNOWN_CALLER: Final = Caller()
"""A caller of whom nothing is known."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A new Session stream, with its first frame."""

    stream: int
    hello: session.Hello
    caller: Caller = UNKNOWN_CALLER


@dataclass(frozen=True, slots=True)
class Received:
    """A later frame of a stream."""

    stream: int
    frame: session.ClientFrame
    full: bool = False
    """Whether the journal's disk is full: requests that would enlarge the journal are refused."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A stream ended, for any reason, also after a `Close` effect. No event of it follows."""

    stream: int


@dataclass(frozen=True, slots=True)
class Called:
    """A unary call. It is answered by one `Reply`, possibly much later."""

    call: int
    request: UnaryRequest
    caller: Caller = UNKNOWN_CALLER
    full: bool = False
    """As in `Received`."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller of a unary call has gone. The driver drops a `Reply` that is already on its way."""

    call: int


@dataclass(frozen=True, slots=True)
class Tick:
    """`next_deadline()` was reached."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The process will stop within this many milliseconds: members are told, new ones are refused."""

    within_ms: int


@dataclass(frozen=True, slots=True)
class JournalRemoved:
    """Somebody has removed the journal's files: nothing survives a restart any more."""


Event = Connected | Received | Disconnected | Called | Cancelled | Tick | Drain | JournalRemoved
