"""What can happen to a coordinator: the only input of `Coordinator.step`.

Streams and calls are numbers that the driver gives out, never the same one twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ferrorpc.v1 import session_pb2 as session
from ferrorpc.wire.identity import Identity

UnaryRequest = session.StatusRequest | session.UnaryStoreRequest | session.UnaryBarrierRequest | session.UnaryReportRequest


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end of a connection."""

    address: str = ""
    identities: frozenset[Identity] | None = None
    """What its certificate says; None where there was none to show."""


UNKNOWN_CALLER: Final = Caller()
"""Nothing is known of it."""


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
    """The journal's disk is full: nothing that makes it larger is to be decided, as far as clients ask for it."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A stream ended, for whatever reason, also after a `Close` effect. Nothing more comes of it."""

    stream: int


@dataclass(frozen=True, slots=True)
class Called:
    """A unary call. It is answered by one `Reply`, perhaps much later."""

    call: int
    request: UnaryRequest
    caller: Caller = UNKNOWN_CALLER
    full: bool = False
    """As in `Received`."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The caller of a unary call went away; a `Reply` for it may still be on its way and is dropped by the driver."""

    call: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: `next_deadline()` was reached."""


@dataclass(frozen=True, slots=True)
class Drain:
    """The process will stop within so many milliseconds: members are told, newcomers are sent elsewhere."""

    within_ms: int


Event = Connected | Received | Disconnected | Called | Cancelled | Tick | Drain
