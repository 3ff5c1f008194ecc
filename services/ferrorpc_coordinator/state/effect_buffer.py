"""Everything one step decided, kept until its end: rows first, then answers, each stamped with where the coordinator stands."""

from __future__ import annotations

from typing import Protocol

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from ferrorpc_coordinator.state.durable_state import DurableState
from ferrorpc_coordinator.state.effects import Close, Effect, Note, Reply, Send, SendMany, UnaryResponse


class HasGeneration(Protocol):
    """A job, as far as a Position tells of it."""

    newest_generation: int


class EffectBuffer:
    """Collects answers in order. The position they carry is that of the step's end, so nothing they tell is later than it."""

    def __init__(self, durable_state: DurableState) -> None:
        self._durable_state = durable_state
        self._effects: list[tuple[HasGeneration | None, Send | SendMany | Reply | Close | Note]] = []

    def send(self, job: HasGeneration | None, stream: int, frame: session_pb2.ServerFrame) -> None:
        """One frame to one stream."""
        self._effects.append((job, Send(stream, frame)))

    def send_many(self, job: HasGeneration, frame: session_pb2.ServerFrame, recipients: list[tuple[int, bytes]]) -> None:
        """One frame to many streams, with their overlays."""
        if recipients:
            self._effects.append((job, SendMany(frame, tuple(recipients))))

    def reply(self, job: HasGeneration | None, call: int, message: UnaryResponse | error_pb2.ErrorDetail) -> None:
        """The answer of a unary call."""
        self._effects.append((job, Reply(call, message)))

    def close(self, stream: int) -> None:
        """Ends a stream after what was sent on it before."""
        self._effects.append((None, Close(stream)))

    def note(self, note: Note) -> None:
        """Something people want to know of."""
        self._effects.append((None, note))

    def flush(self) -> list[Effect]:
        """All effects of the step."""
        effects: list[Effect] = list(self._durable_state.flush())
        positions: dict[int, identity_pb2.Position] = {}
        for job, effect in self._effects:
            generation = 0 if job is None else job.newest_generation
            position = positions.get(generation)
            if position is None:
                position = positions[generation] = self._position(generation)
            if isinstance(effect, Send | SendMany):
                effect.frame.position.CopyFrom(position)
            elif isinstance(effect, Reply) and not isinstance(effect.message, error_pb2.ErrorDetail):
                effect.message.position.CopyFrom(position)
            effects.append(effect)
        self._effects = []
        return effects

    def _position(self, generation: int) -> identity_pb2.Position:
        durable_state = self._durable_state
        return identity_pb2.Position(
            cluster_id=durable_state.cluster_id,
            epoch=durable_state.epoch,
            generation=generation,
            revision=durable_state.revision,
        )
