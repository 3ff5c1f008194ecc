"""One rank of a job that uses NCCL, which takes one rank a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ferrorpc
from ferrorpc.backends.nccl import choose
from ferrorpc.testing.gpu.nccl import FakeNccl
from tests.gpu.scenarios import FAKE, free_bytes, opened, run, say

ELEMENTS = 100_003


def over_fake(scenario: Callable[[Any, dict[str, Any]], None]) -> Callable[[Any, dict[str, Any]], None]:
    """The scenario, where GPUs are fake over a fake NCCL."""

    def with_nccl(cupy: Any, options: dict[str, Any]) -> None:
        if FAKE:
            api = FakeNccl(cupy.machine).api(0)
            choose.open_nccl = lambda: api
        scenario(cupy, options)

    return with_nccl


def alone(cupy: Any, options: dict[str, Any]) -> None:
    """A group of one, opened, used and closed again and again. Says each time how much of the GPU's memory is free.

    Options:
        turns: how often.
        binding: which one is used; "" for any. CuPy's is used where the other one cannot be imported.
    """
    if options.get("binding") == "cupy.cuda.nccl":
        sys.modules["nccl.bindings.nccl"] = None  # type: ignore[assignment]  Python's own way to say that there is none
    if options.get("binding"):
        assert choose.open_nccl().name == options["binding"]
    for turn in range(options["turns"]):
        with opened() as group:
            use(cupy, group)
        say(f"free-{turn}", free_bytes(cupy))
    say("done")


def use(cupy: Any, group: ferrorpc.ProcessGroup) -> None:
    """Raises AssertionError unless operations of a group of one give what they are given."""
    expected = np.arange(ELEMENTS, dtype=np.float32)
    x = cupy.asarray(expected)
    part: Any = group.subgroup([0])
    results = [
        group.all_reduce(x),
        group.all_reduce(x, "mean", async_op=True).wait(host=True),
        group.broadcast(x),
        group.reduce(x),
        group.all_gather(x)[0],
        group.reduce_scatter([x]),
        group.all_to_all([x])[0],
        part.all_reduce(x),
        group.stream().all_reduce(x, 1).wait(),
        group.all_reduce(x, out=x),
    ]
    group.barrier()
    for place, result in enumerate(results):
        np.testing.assert_array_equal(cupy.asnumpy(result), expected, err_msg=f"result {place}")
    assert group.all_reduce(np.ones(3)).tolist() == [1.0] * 3


def leaving(cupy: Any, options: dict[str, Any]) -> None:
    """A group of one with many subgroups, of which none is closed before the process ends."""
    x = cupy.asarray(np.ones(ELEMENTS, np.float32))
    with opened() as group:
        for _ in range(options["count"]):
            part: Any = group.subgroup([0])
            part.all_reduce(x, async_op=True).wait(host=True)
    say("done")


def refused(cupy: Any, options: dict[str, Any]) -> None:
    """The GPU is another rank's, too."""
    calls: list[str] = []
    kind: Any = type(choose.open_nccl())
    for name in ("unique_id", "init"):
        setattr(kind, name, lambda *arguments, name=name: calls.append(name))
    with pytest.raises(ferrorpc.BackendUnavailableError, match="ranks 0 and 1 are on one GPU") as raised:
        opened()
    assert raised.value.fields["ranks"] == [0, 1]
    assert not calls, "NCCL was called"
    say("done")


SCENARIOS = {"alone": over_fake(alone), "leaving": over_fake(leaving), "refused": over_fake(refused)}

if __name__ == "__main__":
    run(SCENARIOS)
