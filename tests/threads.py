"""Runs several parts of a test at once, each on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

SECONDS = 60.0


def together(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each body returns or raises."""
    outcomes: list[Any] = [None] * len(bodies)

    def run(number: int) -> None:
        try:
            outcomes[number] = bodies[number]()
        except Exception as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "it hangs"
    return outcomes


def in_threads(count: int, body: Callable[[int], Any]) -> list[Any]:
    """What `body` returns or raises for each number."""
    return together([partial(body, number) for number in range(count)])


def results_of(outcomes: list[Any]) -> list[Any]:
    """These outcomes; raises the first one that is an exception."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
