"""Effects: the only output of `Coordinator.step`.

Their order matters. Within one step every `Persist` comes before the first answer, and an answer may be sent only when all
`Persist` effects emitted before it are durable. One queue is enough for that: the driver passes rows to the journal, counts
them, and holds each answer but a status until that many are on disk. Heartbeats cause no answers, so they never wait for
a disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ferrorpc.v1 import barrier_pb2, error_pb2, nccl_pb2, rendezvous_pb2, session_pb2 as session, store_pb2

UnaryResponse = session.StatusResponse | session.UnaryStoreResponse | session.UnaryBarrierResponse | session.UnaryReportResponse
Answer = (
    error_pb2.ErrorDetail
    | rendezvous_pb2.JoinResponse
    | rendezvous_pb2.LeaveResponse
    | barrier_pb2.BarrierResponse
    | store_pb2.StoreResponse
    | nccl_pb2.CommBootstrapResponse
    | session.ReportResponse
    | session.DescribeResponse
)
"""What a request of a session can be answered with."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send nearly the same frame on one or more streams. It is encoded once, and completed for each recipient by its overlay.

    In Protobuf, the concatenation of two encodings is the merge of the two messages. An overlay is the encoding of a
    ServerFrame with only the fields that differ, such as the request number; it is empty if none do.
    """

    frame: session.ServerFrame
    recipients: tuple[tuple[int, bytes], ...]
    """Pairs of stream and overlay."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer a unary call; an ErrorDetail fails it."""

    call: int
    message: UnaryResponse | error_pb2.ErrorDetail


@dataclass(frozen=True, slots=True)
class Close:
    """Close this stream once everything sent to it before has been written. The driver answers with `Disconnected`."""

    stream: int


class Persist(NamedTuple):
    """Write a row of the journal; a value of None removes it. Of several writes of one key, the last counts."""

    table: str
    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Note:
    """Log that something happened. It need not wait for the journal."""

    job: str
    kind: str
    text: str
    rank: int
    """World rank, -1 for none."""
    generation: int
    code: error_pb2.ErrorCode.ValueType = error_pb2.ERROR_CODE_UNSPECIFIED
    """Error code of the first cause, where a generation has broken."""
    state: str = ""
    """New state of the member that it is about, where that has changed."""


Effect = Send | Reply | Close | Persist | Note
Row = tuple[str, str, bytes]
"""A durable row, as (table, key, value)."""
