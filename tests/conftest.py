"""ferrorpc comes first: it sets what gRPC reads when it is imported, and tests import gRPC in any order."""

import faulthandler
import gc
import importlib
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key  # capturing leaves this one alone
from hypothesis import HealthCheck, settings

import ferrorpc
from ferrorpc.transports.shared_memory.host_identity import unsupported_reason

assert ferrorpc.__all__

# A shell starts what runs in its background with these ignored, and so does nohup; processes hand that on to those they start.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)


# Threads of OpenBLAS spin for a while after they are made, and after each product, before they sleep; at once is soon enough.
# Of the processor time of `import numpy` on four cores that was two thirds, in each of the processes that tests start.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

# Machines are slow at times: that fails no test.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

FEW_TESTS = 12
NEW_OBJECTS = 10_000
"""More than have gone, and Python looks for garbage among them. Its own 700 cost a fifth of some files' time."""

# What thousands of tests consist of stays to the end: no search for garbage needs to look at it, now or later.
gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes cannot share memory, as on other processors than x86-64, what is about that is skipped.

    Contract suites that repeat another one on other lanes or arrays set `largest_world`: larger worlds are left to the other.
    """
    beyond = {item for item in items if isinstance(item, pytest.Function) and is_beyond(item)}
    config.hook.pytest_deselected(items=list(beyond))
    items[:] = [item for item in items if item not in beyond]
    if hasattr(config, "workerinput"):
        spread(items)
    if why_not := unsupported_reason():
        for item in items:
            if item.get_closest_marker("shared_memory") or "sharedmemory" in item.nodeid.lower().replace("_", ""):
                item.add_marker(pytest.mark.skip(reason=why_not))


def is_beyond(item: pytest.Function) -> bool:
    """Whether its world is larger than its class tests."""
    largest = getattr(item.cls, "largest_world", None)
    return largest is not None and hasattr(item, "callspec") and item.callspec.params.get("size", 0) > largest


def spread(items: list[pytest.Item]) -> None:
    """For several workers, which take file after file: those of tests/integration, which mostly wait for processes and timers,
    are spread evenly over those that compute, so that no processor is idle. Files of few tests come first, as these run whole
    programs, then large ones, so that none that takes long comes last."""
    count = Counter(item.path for item in items)
    place: dict[Path, float] = {}
    for waits in (False, True):
        paths = [path for path in count if ("integration" in path.parts) is waits]
        paths.sort(key=lambda path: (count[path] > FEW_TESTS, -count[path]))
        total, before = sum(count[path] for path in paths), 0
        for path in paths:
            place[path] = before / total
            before += count[path]
    items.sort(key=lambda item: place[item.path])


def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: object) -> None:
    """pytest passes over abstract classes in silence: a class of tests that forgot a method would never run."""
    if name.startswith("Test") and inspect.isabstract(obj):
        missing = ", ".join(sorted(obj.__abstractmethods__))
        raise pytest.Collector.CollectError(f"{name} in {collector.nodeid} lacks {missing}, so none of its tests would run")


def pytest_collection_finish() -> None:
    if "torch" in sys.modules:  # else the first test that wraps a module would import this half of torch, within its deadlines
        importlib.import_module("torch._dynamo")
    settle()
    gc.set_threshold(NEW_OBJECTS)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """What a file has imported stays, too: it would be searched in every later test that collects garbage."""
    with last_resort(item):
        done = yield
    if nextitem is not None and nextitem.path != item.path:
        settle()
    return done


@contextmanager
def last_resort(item: pytest.Item) -> Iterator[None]:
    """Ends the process where a test hangs and the thread that is to end it cannot run, because C++ keeps the interpreter."""
    limit = item.get_closest_marker("timeout")
    seconds = limit.args[0] if limit is not None else float(item.config.getini("timeout"))
    faulthandler.dump_traceback_later(seconds + 30.0, exit=True, file=item.config.stash[fault_handler_stderr_fd_key])
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def settle() -> None:
    """Garbage goes; what is left is not searched again."""
    gc.collect()
    gc.freeze()
