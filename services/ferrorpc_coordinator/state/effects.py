"""What a coordinator wants done: the only output of `Coordinator.step`.

Order is meaning. Within the effects of one step every `Persist` comes before the first answer, and an answer may leave
only when every `Persist` that was ever emitted before it is durable. So a driver needs one queue: it hands rows to the
journal, remembers how many it handed over, and holds each answer until that many are on disk. Nothing that a beat causes is
answered, so beats never wait for a disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ferrorpc.v1 import error_pb2, session_pb2 as session

UnaryResponse = session.StatusResponse | session.UnaryStoreResponse | session.UnaryBarrierResponse | session.UnaryReportResponse


@dataclass(frozen=True, slots=True)
class Send:
    """One frame on one stream."""

    stream: int
    frame: session.ServerFrame


@dataclass(frozen=True, slots=True)
class SendMany:
    """Nearly the same frame on many streams: encoded once, and completed for each recipient by its overlay.

    Protobuf defines the concatenation of two encodings as the merge of the two messages; so an overlay is the encoding of
    a ServerFrame that holds only what differs, such as the request number. It is empty where nothing differs.
    """

    frame: session.ServerFrame
    recipients: tuple[tuple[int, bytes], ...]
    """Pairs of stream and overlay."""

    def encoded(self) -> Iterator[tuple[int, bytes]]:
        """Each stream with the bytes to write to it."""
        shared = self.frame.SerializeToString()
        for stream, overlay in self.recipients:
            yield stream, shared + overlay if overlay else shared

    def decoded(self) -> Iterator[tuple[int, session.ServerFrame]]:
        """Each stream with the frame its reader will see."""
        for stream, data in self.encoded():
            yield stream, session.ServerFrame.FromString(data)


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer of a unary call; an ErrorDetail fails it."""

    call: int
    message: UnaryResponse | error_pb2.ErrorDetail


@dataclass(frozen=True, slots=True)
class Close:
    """End this stream once everything sent on it before has been written. The driver answers with `Disconnected`."""

    stream: int


@dataclass(frozen=True, slots=True)
class Persist:
    """A row of the journal: (table, key) holds value from now on; None removes it. The last write of a key counts."""

    table: str
    key: str
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Note:
    """Something happened that people want to know of. It promises nothing, so it need not wait for the journal."""

    job: str
    kind: str
    text: str
    rank: int
    """World rank, -1 for none."""
    generation: int


Effect = Send | SendMany | Reply | Close | Persist | Note
Row = tuple[str, str, bytes]
"""What recovery is made of: (table, key, value) of every row that was durable."""
