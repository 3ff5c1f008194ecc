"""Makes NCCL communicators within a deadline, and explains on every rank why one could not be made.

NCCL waits without a deadline for a rank that does not come, and a rank that fails leaves the others waiting. So each attempt
has a deadline, and all ranks learn its outcome. A leader creates an id, the coordinator relays it under the generation, and
every rank starts a non-blocking initialisation and polls it until the communicator is complete. Then all ranks meet in a named
barrier, where each says how it went. Unless all of them succeeded, all abort, and the next attempt uses a new id. The number of
the current attempt is in the job's store, so a rank that comes late does not wait with an id that the others have given up.

Cost: one exchange of an id and one barrier for each attempt; while it lasts, one read of the store every CHECK_SECONDS.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from ferrorpc.backends.device.communicator import Communicator, Connector, Split, State, failed
from ferrorpc.backends.device.ending import on_own_thread
from ferrorpc.backends.nccl.api import NcclApi
from ferrorpc.coordination.base import Session
from ferrorpc.coordination.nccl_ids import agree_on_ids
from ferrorpc.errors import BarrierTimeoutError, CollectiveTimeoutError, FerroError, NcclError, StoreTimeoutError

INIT_SECONDS: Final = 30.0
"""How long an attempt may take."""
ATTEMPTS: Final = 2
POLL_SECONDS: Final = 2e-3
CHECK_SECONDS: Final = 0.5
VERDICT_SECONDS: Final = 5.0
ABORT_SECONDS: Final = 10.0
_GOOD: Final = b"complete"


class _Overtaken(Exception):
    """The others have begun a later attempt."""


class NcclConnector(Connector):
    """Makes communicators for one rank.

    Args:
        api: the binding.
        session: with the coordinator.
        on_device: returns a context in which the rank's GPU is the current one.
        init_seconds: how long an attempt may take.
        verdict_seconds: how long the ranks that have finished an attempt wait for those that have not.
    """

    library = "NCCL"
    waits_on_gpu = True

    def __init__(
        self,
        api: NcclApi,
        session: Session,
        on_device: Callable[[], contextlib.AbstractContextManager[object]],
        init_seconds: float = INIT_SECONDS,
        verdict_seconds: float = VERDICT_SECONDS,
    ) -> None:
        self._api = api
        self._session = session
        self._on_device = on_device
        self._seconds = init_seconds
        self._verdict_seconds = verdict_seconds
        self._clock = session.clock
        self.explanation = f"by NCCL {api.version} through {api.name}, which chooses how"

    @property
    def split(self) -> Split | None:
        return self._split if self._api.features.split else None

    def connect(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A new communicator of these world ranks, in their order.

        Raises:
            NcclError: no attempt succeeded; the message says who did not come, or what each rank met.
            BarrierTimeoutError: the coordinator does not answer.
            FerroError: the cause that ended the generation.
        """
        problem, attempt = "", 0
        for _ in range(ATTEMPTS):
            attempt = max(attempt + 1, self._attempt_in_force(name))
            if attempt > 1:
                self._session.store.set(self._key(name), str(attempt).encode(), bind="generation")
            made = self._try(name, ranks, attempt)
            if not isinstance(made, str):
                return made
            problem = made
        message = f"NCCL's communicator {name!r} of {len(ranks)} ranks did not come about in {ATTEMPTS} attempts: {problem}"
        raise NcclError(message, hint="look at the ranks named above; NCCL_DEBUG=INFO says what NCCL itself was at")

    def _split(self, parent: Communicator, label: str, ranks: Sequence[int], group_rank: int | None) -> Communicator | None:
        """As `Split`, without an id; the ranks are for messages only.

        Raises:
            NcclError: it was not complete in time, or NCCL refused.
            FerroError: the cause that ended the generation.
        """
        child = None
        try:
            with self._on_device():
                child = parent.split(None if group_rank is None else 0, group_rank or 0)
            for communicator, what in ((parent, label), (child, f"{label} of ranks {list(ranks)}")):
                if communicator is not None:
                    self._await(communicator, what, f"NCCL's {what} was not complete within {self._seconds:g} s")
        except BaseException as error:
            self.give_up(child)
            if isinstance(error, FerroError):
                self._session.membership.latch.check()  # a communicator that was aborted says only that
            raise
        return child

    def _await(self, communicator: Communicator, what: str, late: str, check: Callable[[], None] = lambda: None) -> None:
        """Returns when a communicator is complete.

        Args:
            what: what it is at, for the error.
            late: the message where it is not complete in time.
            check: called every CHECK_SECONDS; what it raises ends the wait.
        """
        clock, latch = self._clock, self._session.membership.latch
        parker, until = clock.parker(), clock.now() + self._seconds
        check_at = clock.now() + CHECK_SECONDS
        while (state := communicator.state()) is State.IN_PROGRESS:
            latch.check()
            now = clock.now()
            if now >= until:
                raise CollectiveTimeoutError([], late)
            if now >= check_at:
                check_at = now + CHECK_SECONDS
                check()
            parker.park(min(until, now + POLL_SECONDS))
        if state is not State.SUCCESS:
            raise failed(what, state, communicator.last_error())

    def _try(self, name: str, ranks: Sequence[int], attempt: int) -> Communicator | str:
        """One attempt, whose outcome is the same on every rank: a communicator, or why there is none."""
        with contextlib.ExitStack() as undo:
            own = ""
            try:
                communicator = self._begin(name, ranks, attempt)
                undo.callback(self.give_up, communicator)
                late = f"not every rank had come after {self._seconds:g} s"
                self._await(communicator, "its initialisation", late, partial(self._check_in_force, name, attempt))
            except _Overtaken:
                return "the others had given up before this rank came"
            except (NcclError, CollectiveTimeoutError) as error:
                undo.close()  # before the verdict
                self._session.membership.latch.check()
                own = error.message
            problem = self._verdict(name, ranks, attempt, own)
            if problem:
                return problem
            undo.pop_all()
            return communicator

    def _begin(self, name: str, ranks: Sequence[int], attempt: int) -> Communicator:
        session, world = self._session, self._session.membership.assignment
        with self._on_device():
            ids = agree_on_ids(session, name, ranks, self._api.unique_id, attempt=attempt, timeout=self._seconds)
            ids = ids if self._api.features.scalable else ids[:1]
            return self._api.init(len(ranks), list(ranks).index(world.rank), ids)

    def _check_in_force(self, name: str, attempt: int) -> None:
        if self._attempt_in_force(name) > attempt:
            raise _Overtaken

    def _verdict(self, name: str, ranks: Sequence[int], attempt: int, own: str) -> str:
        """The common outcome of an attempt: "" if all ranks succeeded, else which did not come, or what each met.

        Args:
            own: this rank's problem; "" for none.

        Raises:
            BarrierTimeoutError: the coordinator does not answer.
        """
        said = own.encode()[:1024] or _GOOD
        timeout = self._verdict_seconds + (0 if own else self._seconds)
        try:
            texts = self._session.barrier(f"ferrorpc/nccl/{name}/{attempt}", said, ranks=ranks, timeout=timeout)
        except BarrierTimeoutError as late:
            if not late.missing:  # it is the coordinator that does not answer
                raise
            known = self._session.described(late.missing)
            who = ", ".join(f"rank {rank}" for rank in late.missing)
            return f"{who} did not arrive" + (f" ({known})" if known else "") + (f"; here: {own}" if own else "")
        bad = [
            f"rank {rank}: {text.decode(errors='replace')}"
            for rank, text in zip(sorted(ranks), texts, strict=True)
            if text != _GOOD
        ]
        return "; ".join(bad)

    def _attempt_in_force(self, name: str) -> int:
        try:
            return int(self._session.store.get(self._key(name), timeout=0))
        except (StoreTimeoutError, ValueError):
            return 1

    def _key(self, name: str) -> str:
        return f"ferrorpc/nccl/{self._session.membership.assignment.generation}/{name}"

    def give_up(self, communicator: Communicator | None) -> None:
        """Aborts a communicator, which may block, on a thread of its own, and waits at most ABORT_SECONDS for it."""
        if communicator is not None:
            on_own_thread(self._clock, self._on_device, communicator.abort, self._clock.now() + ABORT_SECONDS)
