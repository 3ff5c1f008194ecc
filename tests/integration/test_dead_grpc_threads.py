"""A thread of gRPC that lacks memory for what arrives ends, and tells nobody. What waits for it ends all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.launching import run, write_script

SCRIPT = """
import contextlib, gc, threading
import grpc._server
import ferrorpc
from ferrorpc.coordination.session_stream import SessionStream

def no_memory(*arguments):
    raise MemoryError

class NoMemory:
    next_call_event = no_memory

ended = threading.Event()
threading.excepthook = lambda failed: ended.set()
group = ferrorpc.init_process_group(transport="grpc", timeout=3)
group.all_reduce(1.0)
if group.rank:
    {damage}
    with contextlib.suppress(ferrorpc.StoreTimeoutError):  # its answer may be what is not read any more
        group.store.set("news", b"")
    assert ended.wait(20), "gRPC's thread goes on"
else:
    group.store.get("news", timeout=20)  # it does not leave before the damage is done: that it leaves is what arrives there
group.close()
print(f"rank {{group.rank}} is closed", flush=True)
"""


@pytest.mark.parametrize(
    "damage",
    [
        "grpc._server._process_event_and_continue = no_memory",
        "[it] = [each for each in gc.get_objects() if isinstance(each, SessionStream) and each._call.is_active()]; "
        "it._channel._call_state.channel = NoMemory()",  # of those attempts that failed before it, some may be left
    ],
    ids=["of the server for peers", "of the session"],
)
def test_a_rank_without_a_thread_of_grpc_can_leave(tmp_path: Path, damage: str) -> None:
    script = write_script(tmp_path, SCRIPT.format(damage=damage))
    result = run("-n", "2", script, timeout=60)
    assert result.returncode == 0, result.stderr
    for rank in range(2):
        assert f"rank {rank} is closed" in result.stdout
