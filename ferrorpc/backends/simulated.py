"""A whole world in one process: for tests, for experiments, and for replaying schedules from a seed."""

from __future__ import annotations

from functools import partial

from ferrorpc.backends.base import Backend
from ferrorpc.backends.message import MessageBackend
from ferrorpc.coordination.base import Session
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import ConfigError
from ferrorpc.guard import SYSTEM_CLOCK, Clock, seconds_of
from ferrorpc.transports.inproc import Faults, InprocTransport, Network, seed_of
from ferrorpc.transports.mailbox import Mailbox


class Networks:
    """The networks of a simulated world: one for each generation, so that no message of an earlier one can arrive."""

    def __init__(self, clock: Clock, faults: Faults | None, seed: int) -> None:
        self._clock = clock
        self._faults = faults
        self._seed = seed_of(seed)
        self._networks: dict[int, Network] = {}

    def of(self, generation: int) -> Network:
        """The network of a generation."""
        network = self._networks.get(generation)
        if network is None:
            fresh = Network(self._clock, self._faults, self._seed + generation)
            network = self._networks.setdefault(generation, fresh)
            for old in [number for number in list(self._networks) if number < generation]:
                self._networks.pop(old, None)  # all members have left it but killed ones, which had not received everything
        return network


class SimulatedBackend(MessageBackend):
    """One rank of an in-process world. Make all ranks at once with `create_group`; use each from a thread of its own."""

    name = "simulated"

    def __init__(self, session: Session, networks: Networks, timeout: float) -> None:
        assignment, latch = session.membership.assignment, session.membership.latch
        mailbox = Mailbox(assignment.rank, latch.end)
        transport = InprocTransport(
            assignment.rank,
            assignment.size,
            networks.of(assignment.generation),
            mailbox,
            latch,
            partial(session.report_link_lost, latch=latch),
        )
        super().__init__(transport, session, timeout=timeout)
        self._networks = networks

    @staticmethod
    def create_group(
        size: int, *, clock: Clock | None = None, faults: Faults | None = None, seed: int = 0, timeout: float = 60.0
    ) -> list[Backend]:
        """The backends of ranks 0 to size - 1 of a new world.

        Args:
            size: world size, at least 1.
            clock: used by all waits; the real clock by default.
            faults: delays of messages, drawn from `seed`.
            timeout: default timeout of an operation, in seconds.

        Raises:
            InvalidWorldSizeError: the size is no integer, or less than 1.
            ConfigError: the faults delay nothing, or also kill or pause ranks, as only `run_world` can.
            UsageError: the timeout is no number of seconds.
        """
        if faults is not None and (isinstance(faults, type) or not callable(getattr(faults, "delay", None))):
            raise ConfigError(f"faults={faults!r} delays no messages", hint="make a FaultPlan(delay_seconds=(low, high))")
        if getattr(faults, "kill", None) or getattr(faults, "pause", None):
            raise ConfigError(f"faults={faults!r} kills or pauses ranks", hint="give it to ferrorpc.testing.run_world()")
        chosen, seconds = SYSTEM_CLOCK if clock is None else clock, seconds_of(timeout, 60.0)
        world = LocalWorld(size, clock=chosen)
        networks = Networks(chosen, faults, seed)
        return [SimulatedBackend(world.session(rank), networks, seconds) for rank in range(size)]

    def renew(self, timeout: float) -> SimulatedBackend:
        self.transport.close(0.0)
        self.session.rejoin(timeout)
        return type(self)(self.session, self._networks, self.timeout)
