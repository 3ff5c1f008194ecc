"""A program: two threads continue a split backward pass for the first time, while garbage is collected in one of them.

In each of several processes another collection is the one during which the interpreter goes to the second thread. Prints how
many of them ended; who has not after SECONDS is killed.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from typing import Any

import torch

from ferrorpc.torch.split_backward import SplitBackward

PROCESSES = 8
SECONDS = 20.0


def prepared() -> SplitBackward:
    x, weight = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    split = SplitBackward([x], [x * weight * 2])
    split.input([torch.ones(3)])
    return split


def continue_both(place: int) -> None:
    """The second begins in the `place`-th collection of the first."""
    now, collections = threading.Event(), []
    engine: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def collecting(*arguments: Any, **options: Any) -> Any:
        if threading.current_thread() is first:
            gc.set_threshold(1)
        try:
            return engine(*arguments, **options)
        finally:
            gc.set_threshold(1_000_000)

    def pause(phase: str, _: dict[str, int]) -> None:
        if phase == "start" and threading.current_thread() is first:
            collections.append(phase)
            if len(collections) == place:
                gc.set_threshold(1_000_000)
                now.set()
                time.sleep(0.2)

    def follow() -> None:
        now.wait()
        two.weight()

    one, two = prepared(), prepared()
    torch.autograd._engine_run_backward = collecting  # type: ignore[attr-defined]
    first, second = (threading.Thread(target=body, daemon=True) for body in (one.weight, follow))
    gc.callbacks.append(pause)
    second.start()
    first.start()
    first.join()
    now.set()
    second.join()


def main() -> None:
    children = []
    torch.ones((), requires_grad=True).backward(torch.ones(()))  # imports what any backward pass needs
    gc.set_threshold(1_000_000)
    gc.freeze()  # so that each collection is short
    for place in range(1, PROCESSES + 1):
        child = os.fork()
        if child == 0:
            continue_both(place)
            os._exit(0)
        children.append(child)
    ended, until = 0, time.monotonic() + SECONDS
    for child in children:
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > until:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.02)
        else:
            ended += 1
    print(ended)


if __name__ == "__main__":
    main()
