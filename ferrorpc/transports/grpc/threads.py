"""The executor of a worker's gRPC server: a daemon thread for every call.

A call lasts as long as its peer, so a thread pool of any fixed size could leave some peer without a thread. And the standard
pool joins its threads at interpreter exit, which hangs for as long as a peer keeps its stream open.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from ferrorpc.guard import Clock

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class ThreadPerCall(Executor):
    """Runs each submitted function on a new thread. The server's `maximum_concurrent_rpcs` limits how many there are."""

    def __init__(self, clock: Clock, name: str) -> None:
        self._clock = clock
        self._name = name
        self._numbers = itertools.count(1)

    def submit(
        self, function: Callable[Parameters, Result], /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Future[Result]:
        """Starts the function at once, on a thread of its own."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = function(*arguments, **options)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(result)

        self._clock.start(run, f"{self._name}-{next(self._numbers)}")
        return future
