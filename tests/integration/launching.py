"""Starts `ferrorpc run` as a user would, and looks at what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.waiting import eventually


def needs(*modules: str) -> pytest.MarkDecorator:
    """Skips where one of these is not installed. They are not imported: only the processes that a test starts use them."""
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def write_script(directory: Path, body: str, name: str = "script.py") -> str:
    """A worker script."""
    path = directory / name
    path.write_text(textwrap.dedent(body))
    return str(path)


def environment(**more: str) -> dict[str, str]:
    """This process's without what an outer job may have set, and with these."""
    prefixes = ("FERRORPC_", "TORCHELASTIC_", "PET_", "SLURM_", "OMPI_", "PMI_")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_COMPLETION_INDEX")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes) and name not in names}
    return kept | more


def start(*arguments: str, **more: str) -> subprocess.Popen[str]:
    """`ferrorpc run` with these arguments, and these variables, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "ferrorpc", "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )


@contextlib.contextmanager
def started(*arguments: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """The same, killed at the end. The error of a test that fails meanwhile says what launcher and ranks printed last."""
    process = start(*arguments, **{"PYTHONFAULTHANDLER": "1", **more})
    try:
        yield process
    except BaseException as error:
        error.add_note("\n".join(last_words(process)))
        raise
    finally:
        process.kill()
        process.communicate(timeout=30)


def run(*arguments: str, timeout: float = 100, **more: str) -> subprocess.CompletedProcess[str]:
    """The same, to its end. One that has none in time is asked where it is."""
    process = start(*arguments, **{"PYTHONFAULTHANDLER": "1", **more})
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        out, err = last_words(process)
        raise AssertionError(f"the launcher did not end within {timeout} s\n{out}\n{err}") from None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


def last_words(process: subprocess.Popen[str]) -> tuple[str, str]:
    """All output of a launcher, which is killed. Ranks with PYTHONFAULTHANDLER show where their threads are."""
    for pid in children_of(process.pid):  # through the launcher, if that still listens
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.communicate(timeout=5)
    process.kill()
    return process.communicate(timeout=30)


def read_numbers(directory: Path, pattern: str, count: int, timeout: float = 60) -> list[int]:
    """The numbers in the `count` files that workers write, as soon as all are there."""

    def complete() -> list[str] | None:
        texts = [path.read_text() for path in sorted(directory.glob(pattern))]
        return texts if len(texts) == count and all(text.endswith("\n") for text in texts) else None

    return [int(text) for text in eventually(complete, f"{count} files {pattern}", timeout)]


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pids: list[int], timeout: float = 60) -> list[int]:
    """Those of `pids` that still live after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    left = list(pids)
    while left and time.monotonic() < deadline:
        left = [pid for pid in left if alive(pid)]
        time.sleep(0.02)
    return left


def children_of(pid: int) -> dict[int, str]:
    """Every process whose parent is `pid`, with its command line."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found[int(stat.parent.name)] = (stat.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def coordinator_of(launcher: int, timeout: float = 60) -> tuple[int, str]:
    """Process id and address of a launcher's own coordinator, once it runs."""

    def running() -> tuple[int, str] | None:
        for pid, command in children_of(launcher).items():
            if "-m ferrorpc_coordinator" in command and "exec_shim.py" not in command:
                return pid, command.partition("--listen ")[2].split()[0]
        return None

    return eventually(running, "a coordinator", timeout)


def kill_all(pids: list[int]) -> None:
    """Leaves nothing behind when a test has failed."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
