"""The simulated machine of the coordinator: a journal with random delays, pauses, crashes and restarts."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from ferrorpc_coordinator.state.coordinator import Coordinator
from ferrorpc_coordinator.state.effects import Close, Effect, Note, Persist, Reply, Send
from ferrorpc_coordinator.state.events import Connected, Event, Tick
from ferrorpc_coordinator.state.settings import MILLISECOND, Settings

from ferrorpc.v1 import session_pb2

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Host:
    """Carries out effects like the driver: answers wait until every earlier row is durable, and commits are grouped."""

    def __init__(
        self, simulation: Simulation, settings: Settings, deliver: Callable[[int, session_pb2.ServerFrame], None]
    ) -> None:
        self._simulation = simulation
        self._settings = settings
        self._deliver = deliver
        self._mints = itertools.count(1)
        self.rows: dict[tuple[str, str], bytes] = {}
        self.coordinator: Coordinator | None = None
        self.paused = False
        self._inbox: list[Event] = []
        self._life = 0
        self._filling: list[Persist] = []
        self._writing: list[Persist] = []
        self._emitted = 0
        self._durable = 0
        self._held: deque[tuple[int, Effect]] = deque()
        self._armed = -1

    @property
    def up(self) -> bool:
        """Whether a coordinator runs; a paused process still has its sockets open."""
        return self.coordinator is not None

    def start(self) -> None:
        """Starts a coordinator from the durable rows."""
        recovered = [(table, key, value) for (table, key), value in self.rows.items()]
        now = self._simulation.now
        self.coordinator = Coordinator(
            self._settings, recovered, mint=lambda: f"minted-{self._life}-{next(self._mints)}", now_ns=now
        )
        self._simulation.note(lambda: f"coordinator starts on {len(recovered)} rows")
        self.take(Tick())

    def crash(self) -> None:
        """kill -9: rows that are not durable are lost, and so are the answers that waited for them."""
        self._simulation.note(lambda: f"coordinator crashes, {self._emitted - self._durable} rows are lost")
        self._life += 1
        self.coordinator = None
        self.paused = False
        self._inbox.clear()
        self._filling, self._writing = [], []
        self._held.clear()
        self._durable = self._emitted
        self._armed = -1

    def pause(self, duration: int) -> None:
        """SIGSTOP: events pile up."""
        self._simulation.note(lambda: f"coordinator pauses for {duration / 1e9:.1f} s")
        self.paused = True
        life = self._life
        self._simulation.after(duration, lambda: self._wake(life))

    def _wake(self, life: int) -> None:
        if life != self._life:
            return
        self._simulation.note(lambda: f"coordinator wakes to {len(self._inbox)} events")
        self.paused = False
        inbox, self._inbox = self._inbox, []
        for event in [Tick(), *inbox] if self._simulation.random.random() < 0.5 else [*inbox, Tick()]:
            self.take(event)

    def take(self, event: Event) -> None:
        """An event reaches the process."""
        if self.paused:
            self._inbox.append(event)
        elif self.coordinator is not None:
            simulation = self._simulation
            if not isinstance(event, Tick):
                simulation.note(lambda: f"    takes {_words(event)}")
            for effect in self.coordinator.step(event, simulation.now):
                self._carry_out(effect)
            simulation.check_structure(self.coordinator)
            self._commit()
            self._arm()

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Persist):
            self._simulation.checker.row_written(effect.table, effect.key, effect.value)
            self._filling.append(effect)
            self._emitted += 1
        elif self._emitted > self._durable:
            self._held.append((self._emitted, effect))
        else:
            self._release(effect)

    def _release(self, effect: Effect) -> None:
        match effect:
            case Send():
                shared = effect.frame.SerializeToString()
                for stream, overlay in effect.recipients:
                    self._deliver(stream, session_pb2.ServerFrame.FromString(shared + overlay))
            case Close(stream):
                self._simulation.close(stream)
            case Reply() | Persist() | Note():
                pass

    def _commit(self) -> None:
        if self._filling and not self._writing:
            self._writing, self._filling = self._filling, []
            duration = self._simulation.random.randint(1, 20) * MILLISECOND
            life = self._life
            self._simulation.after(duration, lambda: self._committed(life))

    def _committed(self, life: int) -> None:
        if life != self._life:
            return
        for row in self._writing:
            self._simulation.checker.row_durable(row.table, row.key, row.value)
            if row.value is None:
                self.rows.pop((row.table, row.key), None)
            else:
                self.rows[row.table, row.key] = row.value
        self._durable += len(self._writing)
        self._writing = []
        while self._held and self._held[0][0] <= self._durable:
            self._release(self._held.popleft()[1])
        self._commit()

    def _arm(self) -> None:
        assert self.coordinator is not None
        deadline = self.coordinator.next_deadline()
        if deadline is not None and (self._armed < 0 or deadline < self._armed):
            self._armed = deadline
            life = self._life
            self._simulation.at(deadline, lambda: self._ring(life, deadline))

    def _ring(self, life: int, deadline: int) -> None:
        if life != self._life or self._armed != deadline:
            return
        self._armed = -1
        if self.paused:
            return
        self.take(Tick())


def _words(event: Event) -> str:
    """An event in a trace."""
    if isinstance(event, Connected):
        how = "resumes" if event.hello.resume_token else "says hello"
        return f"stream {event.stream}: {event.hello.name} ({event.hello.instance_id}) {how}"
    return " ".join(str(event).split())
