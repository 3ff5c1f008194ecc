"""Everything one step decided, kept until its end: rows first, then answers, each stamped with where the coordinator stands."""

from __future__ import annotations

from typing import Protocol

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from ferrorpc_coordinator.state.effects import Close, Effect, Note, Reply, Send, SendMany, UnaryResponse
from ferrorpc_coordinator.state.ledger import Ledger


class Place(Protocol):
    """A job, as far as a Position tells of it."""

    newest_generation: int


class Answers:
    """Collects answers in order. The position they carry is that of the step's end, so nothing they tell is later than it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: list[tuple[Place | None, Send | SendMany | Reply | Close | Note]] = []

    def send(self, place: Place | None, stream: int, frame: session_pb2.ServerFrame) -> None:
        """One frame to one stream."""
        self._waiting.append((place, Send(stream, frame)))

    def send_many(self, place: Place, frame: session_pb2.ServerFrame, recipients: list[tuple[int, bytes]]) -> None:
        """One frame to many streams, with their overlays."""
        if recipients:
            self._waiting.append((place, SendMany(frame, tuple(recipients))))

    def reply(self, place: Place | None, call: int, message: UnaryResponse | error_pb2.ErrorDetail) -> None:
        """The answer of a unary call."""
        self._waiting.append((place, Reply(call, message)))

    def close(self, stream: int) -> None:
        """Ends a stream after what was sent on it before."""
        self._waiting.append((None, Close(stream)))

    def note(self, note: Note) -> None:
        """Something people want to know of."""
        self._waiting.append((None, note))

    def flush(self) -> list[Effect]:
        """All effects of the step."""
        effects: list[Effect] = list(self._ledger.flush())
        positions: dict[int, identity_pb2.Position] = {}
        for place, effect in self._waiting:
            generation = 0 if place is None else place.newest_generation
            position = positions.get(generation)
            if position is None:
                position = positions[generation] = self._position(generation)
            if isinstance(effect, Send | SendMany):
                effect.frame.position.CopyFrom(position)
            elif isinstance(effect, Reply) and not isinstance(effect.message, error_pb2.ErrorDetail):
                effect.message.position.CopyFrom(position)
            effects.append(effect)
        self._waiting = []
        return effects

    def _position(self, generation: int) -> identity_pb2.Position:
        ledger = self._ledger
        return identity_pb2.Position(
            cluster_id=ledger.cluster_id, epoch=ledger.epoch, generation=generation, revision=ledger.revision
        )
