"""The executor of a worker's gRPC server: a daemon thread for every call.

A call lasts as long as its peer, so a thread pool of any fixed size could leave some peer without a thread. And the standard
pool joins its threads at interpreter exit, which hangs for as long as a peer keeps its stream open.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from ferrorpc.errors import LimitExceededError
from ferrorpc.guard import Clock

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_log = logging.getLogger("ferrorpc.transports")


class ThreadPerCall(Executor):
    """Runs each submitted function on a new thread. The server's `maximum_concurrent_rpcs` limits how many there are.

    Attributes:
        closing: set by the owner once nobody needs the calls that still come. They then end unheard, without a message.
    """

    def __init__(self, clock: Clock, name: str) -> None:
        self.closing = False
        self._clock = clock
        self._name = name
        self._numbers = itertools.count(1)

    def submit(
        self, function: Callable[Parameters, Result], /, *arguments: Parameters.args, **options: Parameters.kwargs
    ) -> Future[Result]:
        """Starts the function at once, on a thread of its own. Where there is none, the future has the error.

        It is not raised: that would end gRPC's thread, which serves all other calls as well.
        """
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = function(*arguments, **options)
            except BaseException as error:
                future.set_exception(error)
                raise
            future.set_result(result)

        try:
            self._clock.start(run, f"{self._name}-{next(self._numbers)}")
        except LimitExceededError as error:
            if not self.closing:  # an interpreter that exits starts no threads (Python 3.12), and its server is closed then
                _log.error("a peer's stream is not read, so its messages will be missing: %s", error)
            future.set_exception(error)
        return future
