"""What programs of one rank share: `python -m tests.gpu.PROGRAM SCENARIO OPTIONS`, with OPTIONS as JSON.

What happens to a rank is on stdout, a line for each: a word and what belongs to it. FERRORPC_* variables name the job. With
FAKE_GPU set the GPU is a fake one of this process alone, for those who mend these files where there is none.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np

import ferrorpc
from ferrorpc.arrays.devices import open_device
from ferrorpc.testing.gpu.machine import Machine
from ferrorpc.testing.gpu.stand_in import stand_in

FAKE = "FAKE_GPU" in os.environ
Scenario = Callable[[Any, dict[str, Any]], None]


def say(*words: object) -> None:
    """One line."""
    print(*words, flush=True)


def say_error(error: ferrorpc.FerroError) -> None:
    """What others shall know of an error: its class, the rank that it names, -1 for none, and its message."""
    say("error", type(error).__name__, getattr(error, "rank", -1), error.message)


def opened(**options: Any) -> ferrorpc.ProcessGroup:
    """This rank's group."""
    return ferrorpc.init_process_group(device=0, **options)


def check_computes(cupy: Any) -> None:
    """Raises AssertionError unless the GPU still does what it is told."""
    with cupy.cuda.Stream(non_blocking=True):
        x = cupy.asarray(np.arange(99_999, dtype=np.int64))
        assert int(cupy.asnumpy(x.sum())) == 99_999 * 49_999, "the GPU computes no more"


def free_bytes(cupy: Any) -> int:
    """How much of the GPU's memory is free; 0 of a fake one's."""
    return 0 if FAKE else int(cupy.cuda.runtime.memGetInfo()[0])


def run(scenarios: Mapping[str, Scenario]) -> None:
    """Runs the scenario that the command line names."""
    faulthandler.enable()
    scenario, options = sys.argv[1:]
    with stand_in(Machine(1)) if FAKE else nullcontext():
        cupy = open_device(0).cupy
        say("started")
        scenarios[scenario](cupy, json.loads(options))
