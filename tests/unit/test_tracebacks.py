"""What IPython and Jupyter show of an error. They ask the error itself, by a method; a stand-in is the shell that formats."""

import logging
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ferrorpc import CollectiveMismatchError, PeerLostError
from ferrorpc.guard import Latch
from ferrorpc.testing import run_world

NOTE = "(1 call within ferrorpc is left out above; FERRORPC_LOG_LEVEL=DEBUG shows it)\n"


@pytest.fixture(autouse=True)
def shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """An IPython whose shell formats as the interpreter does."""
    module: Any = ModuleType("IPython")
    module.get_ipython = lambda: SimpleNamespace(InteractiveTB=SimpleNamespace(structured_traceback=traceback.format_exception))
    monkeypatch.setitem(sys.modules, "IPython", module)
    monkeypatch.delenv("FERRORPC_LOG_LEVEL", raising=False)


@pytest.fixture
def error() -> PeerLostError:
    latch = Latch()
    latch.trip(PeerLostError(2, "signal 9"))
    try:
        try:
            latch.check()
        except PeerLostError as first:
            first.add_note("seen on rank 0")
            latch.check()
    except PeerLostError as second:
        return second
    raise AssertionError("nothing was raised")


def shown(error: Any) -> tuple[str, list[str]]:
    """What a shell shows, and the files whose lines it names."""
    text = "".join(error._render_traceback_())
    return text, [Path(name).name for name in re.findall(r'File "(.*)", line', text)]


def test_a_shell_shows_the_callers_lines_of_an_error_and_of_what_led_to_it(error: PeerLostError) -> None:
    text, files = shown(error)
    assert files == ["test_tracebacks.py"] * 2
    assert (text.count(NOTE), text.count("During handling of"), text.count("seen on rank 0\n")) == (2, 1, 1)
    assert text.endswith(f"{error}\n{NOTE}")


def test_what_a_shell_has_shown_is_whole_for_its_debugger_and_shown_likewise_again(error: PeerLostError) -> None:
    first = shown(error)
    assert [Path(entry.filename).name for entry in traceback.extract_tb(error.__traceback__)][-1] == "guard.py"
    assert shown(error) == first


@pytest.mark.parametrize("by", ["logger", "variable"])
def test_at_level_debug_a_shell_shows_all_lines(error: PeerLostError, monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    """The variable counts also where no group was made, which alone reads the settings."""
    logger = logging.getLogger("ferrorpc")
    before = logger.level
    if by == "variable":
        monkeypatch.setenv("FERRORPC_LOG_LEVEL", "DEBUG")
    else:
        logger.setLevel("DEBUG")
    try:
        text, files = shown(error)
    finally:
        logger.setLevel(before)
    assert (files, text.count("left out above")) == (["test_tracebacks.py", "guard.py"] * 2, 0)


def test_a_shell_shows_the_callers_lines_of_an_error_in_a_simulated_world() -> None:
    with pytest.raises(CollectiveMismatchError) as caught:
        run_world(2, lambda group: group.all_reduce(np.ones(2 + group.rank)))
    text, files = shown(caught.value)
    assert files == ["test_tracebacks.py"] * 2, "the line that makes the world, and the rank's"
    assert text.count("calls within ferrorpc are left out above") == 1
