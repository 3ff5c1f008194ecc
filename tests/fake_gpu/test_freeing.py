"""A process exits once the communicators that are being freed are free: an exit takes down CUDA, which they use for that."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from ferrorpc.backends.device import freeing
from ferrorpc.backends.device.freeing import Freeing

SECONDS = 30.0
PROGRAM = """
import threading, time
from types import SimpleNamespace
from ferrorpc.backends.nccl.nccl4py import Nccl4pyCommunicator

begun = threading.Event()

def freed(*arguments):
    begun.set()
    time.sleep(0.5)
    print("free")

class Api:
    def ask(self, call, function, *arguments):
        function(*arguments)

bindings = SimpleNamespace(comm_abort=freed, comm_destroy=freed)
communicator = Nccl4pyCommunicator(Api(), bindings, None)
threading.Thread(target=communicator.CALL, daemon=True).start()
begun.wait()
print("exits")
"""


@pytest.mark.parametrize("call", ["abort", "destroy"])
def test_an_exit_waits_for_what_is_being_freed(call: str) -> None:
    program = [sys.executable, "-c", PROGRAM.replace("CALL", call)]
    done = subprocess.run(program, timeout=SECONDS, check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["exits", "free"]


def test_nothing_is_freed_once_the_process_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Freeing()
    with found.begun() as may_run:
        assert may_run
        monkeypatch.setattr(freeing, "EXIT_SECONDS", 0.05)  # it hangs
        ends = threading.Thread(target=found.end)
        ends.start()
        ends.join(SECONDS)
        assert not ends.is_alive()
    with found.begun() as may_run:
        assert not may_run
