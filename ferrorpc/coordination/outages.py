"""The times in which a connection is without its coordinator: for how long, why, what the log says of them, when to give up."""

from __future__ import annotations

from ferrorpc.errors import CoordinatorUnavailableError, FerroError
from ferrorpc.guard import Clock


class Outages:
    """The outages of one connection, which begins in the first: nobody has answered yet.

    The caller holds the connection's lock around `begin`, `end` and `uptime`.

    Args:
        join_timeout: seconds that the coordinator may refuse a member without a session, for a reason that may pass; and the
            most it may be unreachable until `joined` is called.
        max_outage: seconds it may be unreachable at all.
    """

    def __init__(self, address: str, clock: Clock, join_timeout: float, max_outage: float) -> None:
        self._address = address
        self._clock = clock
        self._join_timeout = join_timeout
        self._limit = min(join_timeout, max_outage)
        self._max_outage = max_outage
        self._since: float | None = clock.now()
        self._earlier_seconds = 0.0
        """Of all outages that are over."""
        self._failure: FerroError = CoordinatorUnavailableError("neither refused nor answered")
        self._is_told = False
        """Its beginning was a warning in the log, so its end is one, too."""

    @property
    def is_up(self) -> bool:
        """Whether the coordinator is there."""
        return self._since is None

    def joined(self) -> None:
        """The member has a generation to lose, so from now on an outage may last `max_outage`."""
        self._limit = self._max_outage

    def begin(self, failure: FerroError, is_expected: bool) -> str:
        """The coordinator was lost, or is still away. Returns a warning for the log; "" where it would tell nothing new.

        Args:
            is_expected: nobody needs it any more.
        """
        was_up, is_news = self._since is None, failure.code is not self._failure.code
        self._failure = failure
        if was_up:
            self._since = self._clock.now()
            self._is_told = not is_expected
        if not self._is_told or not (was_up or is_news):
            return ""
        return f"{'lost' if was_up else 'still without'} the coordinator at {self._address}: {failure.message}"

    def end(self) -> str:
        """The coordinator is there. Returns a warning for the log; "" where none was given when the outage began."""
        if self._since is None:
            return ""
        seconds, self._since = self._clock.now() - self._since, None
        self._earlier_seconds += seconds
        told, self._is_told = self._is_told, False
        return f"the coordinator at {self._address} is back after {seconds:.1f} s" if told else ""

    def uptime(self) -> float:
        """Clock time, as if it had stood still in all outages."""
        return (self._clock.now() if self._since is None else self._since) - self._earlier_seconds

    def describe(self) -> str:
        """Why the coordinator is away; empty while it is there."""
        since, failure = self._since, self._failure
        if since is None:
            return ""
        if isinstance(failure, CoordinatorUnavailableError):
            return f"no coordinator at {self._address} for {self._clock.now() - since:.1f} s ({failure.message})"
        return f"the coordinator at {self._address} refuses this process ({failure.message})"

    def final_error(self, has_session: bool) -> FerroError | None:
        """The error of an outage that has lasted too long; None of one that may go on."""
        since, failure = self._since, self._failure
        is_refusal = not isinstance(failure, CoordinatorUnavailableError)
        limit = max(self._limit, self._join_timeout) if is_refusal and not has_session else self._limit
        seconds = 0.0 if since is None else self._clock.now() - since
        if since is None or seconds < limit:
            return None
        if is_refusal:
            return failure
        text = f"nobody answered at {self._address} for {seconds:.1f} s; the last attempt: {failure.message}"
        return CoordinatorUnavailableError(text, hint=failure.hint)
