"""Collects the effects of one step. At the end of the step, rows come first, and every answer is stamped with the position."""

from __future__ import annotations

from typing import Protocol

from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from ferrorpc_coordinator.state.durable_state import DurableState
from ferrorpc_coordinator.state.effects import Close, Effect, Note, Reply, Send, UnaryResponse


class HasGeneration(Protocol):
    """The part of a job that a Position contains."""

    newest_generation: int


class EffectBuffer:
    """Collects effects in order. Answers carry the position at the end of the step, so none reports anything later than it."""

    def __init__(self, durable_state: DurableState) -> None:
        self._durable_state = durable_state
        self._effects: list[tuple[HasGeneration | None, Send | Reply | Close | Note]] = []

    def send(self, job: HasGeneration | None, frame: session_pb2.ServerFrame, recipients: list[tuple[int, bytes]]) -> None:
        """Sends one frame to these streams, each with its own overlay."""
        self._effects.append((job, Send(frame, tuple(recipients))))

    def reply(self, job: HasGeneration | None, call: int, message: UnaryResponse | error_pb2.ErrorDetail) -> None:
        """Answers a unary call."""
        self._effects.append((job, Reply(call, message)))

    def close(self, stream: int) -> None:
        """Closes a stream after everything sent to it before."""
        self._effects.append((None, Close(stream)))

    def note(self, note: Note) -> None:
        """Adds an entry to the log."""
        self._effects.append((None, note))

    def flush(self) -> list[Effect]:
        """Returns the step's effects and starts a new step."""
        effects: list[Effect] = list(self._durable_state.flush())
        positions: dict[int, identity_pb2.Position] = {}
        for job, effect in self._effects:
            generation = 0 if job is None else job.newest_generation
            position = positions.get(generation)
            if position is None:
                position = positions[generation] = self._position(generation)
            if isinstance(effect, Send):
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
