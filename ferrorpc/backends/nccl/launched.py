"""An operation of one site: launched in its lineup when its turn has come, then marked, then landed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

from ferrorpc.arrays.device import Device, Event, Stream
from ferrorpc.backends.nccl.airborne import Airborne, first_cause
from ferrorpc.backends.nccl.lineup import Lineup
from ferrorpc.backends.nccl.site import Site
from ferrorpc.collectives.execution import overdue
from ferrorpc.errors import FerroError
from ferrorpc.guard import Guard
from ferrorpc.wire.frames import Key


class Launched(Airborne):
    """What operations on arrays and on raw pointers have in common.

    Attributes:
        until_done: whether it is complete only when the GPU has come past the mark, or already with the mark.
        queued: told once the mark is there.
        caller: the current stream of the thread that called it, then.
        after: once it is launched: until the GPU has come past these, it waits for what this rank has queued before it.
    """

    device: Device
    caller: Stream
    site: Site
    until_done = False
    queued: Callable[[], None] | None = None
    gives_device_arrays = True
    """Whether its results stay on the GPU."""
    after: Sequence[Event] = ()
    _was_held_up = False

    def __init__(self, site: Site, lineup: Lineup, guard: Guard) -> None:
        self.site = site
        self.device = site.device
        self.polling = site.polling
        self.lineup = lineup
        self.guard = guard

    def join(self, caller: Stream | None = None) -> None:
        """The calling thread's stream goes on after the mark. `caller`: that stream, where it is known."""
        if self.mark is None:
            raise AssertionError(f"{self.label} was not launched")
        (caller or self.device.current()).wait(self.mark)

    def waiting_on(self) -> list[int]:
        return list(self.site.others)

    def explain(self) -> str:
        return self.site.sentence(self.label)

    def timeout_error(self) -> FerroError:
        return overdue(self, self.site.lanes.describe)

    def ask(self, key: Key, signature: str, number: int) -> None:
        """Asks the others where they stand: who calls something else at this place says so, and the generation ends with both
        signatures."""
        if not self._needs_others():
            return
        if self.mark is not None:
            self.site.ask(key, signature, number)
            return
        for rank in self.waiting_on():
            self.site.lanes.transport.probe(rank, key, signature)

    def _needs_others(self) -> bool:
        """Unless it is known that this rank's own GPU alone holds it up, or did so at the last probe: others may be through."""
        held_up = (self.mark is not None and self.mark.done) or not all(event.done for event in self.after)
        before, self._was_held_up = self._was_held_up, held_up
        return not (before or held_up)

    def is_over(self) -> bool:
        """Whether it has landed, for whoever looked. Raises the first cause where it was only let go of."""
        if self.over and not self.has_landed:
            self.guard.latch.check()
        return self.over

    def is_through(self) -> bool:
        """Whether the GPU has come past the mark, so that the result is there. Raises what NCCL has met, or the first cause.

        A communicator that is aborted lets the GPU past all that was in it, which is no result. It is aborted only after the
        generation has ended; what was seen before that is one.
        """
        if self.mark is None or not (self.is_past or self.mark.done):
            self.lineup.has_launched(self)
            return False
        self.is_past = True
        self.guard.latch.check()
        self.has_landed = True
        return True

    def holdings(self) -> object:
        """What the GPU uses of this rank's memory; None where it holds nothing, or nothing was launched."""
        return None

    def release(self) -> None:
        """It is no longer in flight. What the GPU may still use is kept until it has come past it. Idempotent."""
        if self.over:
            return
        self.over = True
        held = None if self.is_past else self.holdings()
        if held is not None:
            self.site.keep(self.lineup, self.mark, held)
        if self.mark is None:
            self.lineup.forget(self)
        self.let_go()
        self.site.landed(self)

    def finish(self) -> None:
        """Its driver is through with it; it is in flight until it lands, unless it has failed."""
        if self.mark is None or self.guard.latch.cause is not None:
            self.release()

    def let_go(self) -> None:
        """Lets go of what it holds, but the results."""

    def was_queued(self) -> None:
        """The mark is there."""
        if self.queued is not None:
            self.queued()
            self.queued = None


class Immediate(Launched):
    """One for which all is there that it needs, so that it is launched as soon as it is its turn: mostly at once.

    Args:
        stream: the caller's; None for the lineup's own, which first waits for what the caller's current one holds now.
    """

    def __init__(self, site: Site, guard: Guard, stream: Stream | None = None) -> None:
        super().__init__(site, site.program, guard)
        self.results, self.specs = [], []
        self.in_turn = stream is None
        self._begins: Event | None = None
        if stream is None:
            self._stream = self.lineup.stream
            self.caller, self._begins = site.device.marked()
        else:
            self._stream = self.caller = stream
        self.is_launched = False
        self.number = self.lineup.join(self)
        site.took_off(self)

    @abstractmethod
    def launch(self, pointer: int) -> None:
        """Asks NCCL for it, in the stream with this number."""

    @first_cause
    def advance(self) -> bool:
        if self._met is not None:
            self.raise_met()
        if self.mark is None and not self._marked():
            return False
        return not self.until_done or self.land()

    def _marked(self) -> bool:
        """Whether the whole of it is in the stream, with a mark behind it."""
        lineup, stream = self.lineup, self._stream
        with lineup.lock, self.device.here():
            if not self.is_launched:
                if not lineup.is_next(self, self.number):
                    return False
                if self._begins is not None:
                    stream.wait(self._begins)
                    self.after = (self._begins,) if lineup.latest is None else (self._begins, lineup.latest)
                self.launch(stream.pointer)
                self.is_launched = True
            if not lineup.has_launched(self):
                return False
            mark = stream.record()
            lineup.passed(self, self.number)
            if self.in_turn:
                lineup.latest = mark
            self.mark = mark
        self.was_queued()
        return True

    @first_cause
    def land(self) -> bool:
        """Whether the GPU has come past it."""
        if self.is_over():
            return True
        if not self.is_through():
            return False
        self.release()
        return True
