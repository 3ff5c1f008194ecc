"""One rank of a job in which something fails."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrorpc
from tests.gpu.scenarios import FAKE, check_computes, opened, run, say, say_error
from tests.waiting import eventually

ELEMENTS = 100_003
PENDING_MAX = 4
"""How many operations are in flight at most."""
HEARD_AFTER = 20
TIMEOUT = 40.0
REFORM_SECONDS = 20.0
ILLEGAL_ADDRESS = 700
WRECK = 'extern "C" __global__ void wreck() { *reinterpret_cast<volatile char*>(1) = 1; }'


def array(cupy: Any, count: int = ELEMENTS, dtype: str = "float32") -> Any:
    """Ones on the GPU."""
    return cupy.asarray(np.ones(count, dtype))


def wrecker(cupy: Any) -> Callable[[], None]:
    """A function that makes the GPU fail for this process."""
    if FAKE:
        return lambda: setattr(cupy.machine, "failure", ILLEGAL_ADDRESS)
    kernel = cupy.RawKernel(WRECK, "wreck")
    kernel.compile()
    return lambda: kernel((1,), (1,), ())


def breaker(cupy: Any) -> Callable[[], None]:
    """A function that raises an error that has nothing to do with the group."""

    def fail() -> None:
        raise RuntimeError("broken on purpose")

    return fail


ENDS = {"wreck": wrecker, "raise": breaker}


def endless(cupy: Any, options: dict[str, Any]) -> None:
    """All_reduces, several at a time, until there is an error.

    Options:
        then: what this rank does while some are in flight, one of ENDS; "" for nothing.
        timeout: seconds.
    """
    then = ENDS[options["then"]](cupy) if options.get("then") else None
    with opened(timeout=options.get("timeout", TIMEOUT)) as group:
        try:
            reduce_on(cupy, group, then)
        except ferrorpc.FerroError as error:
            say_error(error)
            check_broken(cupy, group)
        if then is None:
            check_computes(cupy)
            say("computes")
    say("closed")


def reduce_on(cupy: Any, group: ferrorpc.ProcessGroup, then: Callable[[], None] | None) -> None:
    """All_reduces without an end; after some of them says "running", and calls `then`."""
    x = array(cupy)
    works: deque[Any] = deque()
    for count in itertools.count():
        works.append(group.all_reduce(x, async_op=True))
        if count == HEARD_AFTER:
            say("running", time.time())
            if then is not None:
                then()
        while len(works) > PENDING_MAX or (works and count == HEARD_AFTER):
            found = works.popleft().wait(host=True)
            if then is None:  # else what CuPy does on a GPU that has failed would raise CuPy's own error
                assert float(cupy.asnumpy(found)[-1]) == group.size


def check_broken(cupy: Any, group: ferrorpc.ProcessGroup) -> None:
    """Raises AssertionError unless further calls say that the group is broken; they must not wait for anything."""
    began = time.monotonic()
    for call in (lambda: group.barrier(), lambda: group.all_reduce(np.ones(3))):
        try:
            call()
        except ferrorpc.FerroError:
            continue
        raise AssertionError("a broken group went on")
    assert time.monotonic() - began < TIMEOUT / 4, "a broken group waits"


def mismatch(cupy: Any, options: dict[str, Any]) -> None:
    """Calls that differ among the ranks, each in a generation of its own."""
    group = opened(timeout=TIMEOUT)
    first = group.rank == 0
    calls: dict[str, Callable[[ferrorpc.ProcessGroup], Any]] = {
        "shape": lambda group: group.all_reduce(array(cupy, 1000 if first else 999), async_op=True),
        "dtype": lambda group: group.all_reduce(array(cupy, 1000, "float32" if first else "int32"), async_op=True),
        "operator": lambda group: group.all_reduce(array(cupy), "sum" if first else "max", async_op=True),
        "operation": lambda group: (group.all_reduce if first else group.all_gather)(array(cupy), async_op=True),
        "root": lambda group: group.reduce(array(cupy), group.rank, async_op=True),
    }
    if not FAKE:  # there arrays of a GPU go by the host lanes, as those of the host do
        calls["place"] = lambda group: group.all_reduce(array(cupy) if first else np.ones(ELEMENTS, "float32"), async_op=True)
    for name, call in calls.items():
        in_flight = group.all_reduce(array(cupy), async_op=True)
        began = time.monotonic()
        with pytest.raises(ferrorpc.CollectiveMismatchError) as raised:
            call(group).wait(host=True)
        found = raised.value.signatures
        assert set(found) == {0, 1}, f"{name}: {raised.value}"
        assert found[0] != found[1], f"{name}: {raised.value}"
        assert time.monotonic() - began < TIMEOUT / 4, f"a mismatch of the {name} was found late"
        del in_flight
        group = group.reform(REFORM_SECONDS)
        assert float(cupy.asnumpy(group.all_reduce(array(cupy)))[-1]) == group.size
    group.close()
    say("done")


def wait_for_ever(cupy: Any, options: dict[str, Any]) -> None:
    """Waits for what the other rank does not do: rank 0 in recv, rank 1 in an operation that an option names."""
    with opened(timeout=TIMEOUT) as group:
        other = 1 - group.rank
        group.barrier()
        waits: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda: group.all_reduce(array(cupy), async_op=True).wait(host=True),
            "synchronize": lambda: (group.all_reduce(array(cupy), async_op=True), group.synchronize()),
            "barrier": group.barrier,
            "recv": lambda: group.recv(other, tag=7),
        }
        say("waiting")
        try:
            waits["recv" if group.rank == 0 else options["operation"]]()
        except KeyboardInterrupt:
            say("interrupted")
            raise
        except ferrorpc.FerroError as error:
            say_error(error)
            check_broken(cupy, group)
    say("closed")


def subgroups(cupy: Any, options: dict[str, Any]) -> None:
    """Opens, uses and closes subgroups when it is told to, and ends when it is told to.

    Options:
        count: how many.
        folder: the files that tell it are made here.
    """
    x = array(cupy)

    def use_one(group: ferrorpc.ProcessGroup) -> None:
        part: Any = group.subgroup([1, 0])
        assert float(cupy.asnumpy(part.all_reduce(x))[-1]) == group.size
        part.close()

    with opened(timeout=TIMEOUT) as group:
        use_one(group)
        group.barrier()
        say("opened")
        eventually((Path(options["folder"]) / "begin").exists, "told to begin", TIMEOUT)
        for _ in range(options["count"]):
            use_one(group)
        group.barrier()
        say("subgroups-closed")
        eventually((Path(options["folder"]) / "end").exists, "told to end", TIMEOUT)
    say("closed")


SCENARIOS = {"endless": endless, "mismatch": mismatch, "wait_for_ever": wait_for_ever, "subgroups": subgroups}

if __name__ == "__main__":
    run(SCENARIOS)
