"""Measures torch's own rendezvous and store in the same way, for a comparison within one run.

Torch runs in a separate process, with a thread and a store client for each member. Its time is limited: with 128 members its
rendezvous takes a minute or does not end at all.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any, Final

LIMIT_SECONDS: Final = 90.0
BARRIERS: Final = 5


def measure(kind: str, members: int, limit_seconds: float = LIMIT_SECONDS) -> dict[str, Any]:
    """Measures "rendezvous" (c10d) or "barrier" (TCPStore). Returns {"skipped": why} or {"median_ms": ...}."""
    if find_spec("torch") is None:
        return {"skipped": "torch is not installed"}
    command = [sys.executable, "-P", "-m", "ferrorpc.cli.bench.torch_baseline", kind, str(members)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"skipped": f"did not finish within {limit_seconds:.0f} s"}
    if done.returncode != 0:
        return {"skipped": f"failed: {' '.join(done.stderr.strip().splitlines()[-1:])}"}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def describe(result: dict[str, Any]) -> str:
    """One result as text."""
    if "skipped" in result:
        return f"not measured: {result['skipped']}"
    times = f"{result['rounds']} time{'s' * (result['rounds'] != 1)}"
    return f"{result['median_ms']:9.1f} ms   connecting apart: {result['connect_ms']:.1f} ms ({times})"


def rendezvous(members: int) -> tuple[list[float], float]:
    """One c10d rendezvous of `members` nodes, as in torchrun: the seconds from the first call to the last answer, in a list,
    and those it took to connect. There is no warm-up: it takes too long.
    """
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients, connecting = _connected(TCPStore, server.port, members)
    handlers = [
        DynamicRendezvousHandler.from_backend("bench", client, C10dRendezvousBackend(client, "bench"), members, members)
        for client in clients
    ]
    return [_all_at_once([handler.next_rendezvous for handler in handlers])], connecting


def barrier(members: int) -> tuple[list[float], float]:
    """Barriers of `members` TCPStore clients: add one to a counter, the last sets a key, all wait for it. The seconds of each,
    without the first, a warm-up, and those it took to connect.
    """
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    clients, connecting = _connected(TCPStore, server.port, members)

    def arrive(client: Any, ordinal: int) -> None:
        if client.add(f"{ordinal}/arrived", 1) == members:
            client.set(f"{ordinal}/released", b"1")
        client.wait([f"{ordinal}/released"])

    seconds = [_all_at_once([partial(arrive, client, ordinal) for client in clients]) for ordinal in range(1 + BARRIERS)]
    return seconds[1:], connecting


def _connected(store: Callable[..., Any], port: int, members: int) -> tuple[list[Any], float]:
    """A client for each member, and the seconds it took to connect them, with a thread each."""
    clients: list[Any] = []

    def connect() -> None:
        clients.append(store("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)))

    seconds = _all_at_once([connect] * members)
    return clients, seconds


def _all_at_once(actions: list[Callable[[], object]]) -> float:
    """Runs each action in a thread. Returns the seconds from their common start until the last has finished.

    Raises:
        Exception: what one of them raised; that took no time worth reporting.
    """
    start = threading.Barrier(len(actions) + 1)
    failures: list[Exception] = []

    def body(action: Callable[[], object]) -> None:
        start.wait()
        try:
            action()
        except Exception as error:  # noqa: BLE001  torch may raise anything
            failures.append(error)

    threads = [threading.Thread(target=body, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if failures:
        raise failures[0]
    return seconds


def main() -> None:
    """Runs the measurement named on the command line and writes one line of JSON."""
    kind, members = sys.argv[1], int(sys.argv[2])
    seconds, connecting = rendezvous(members) if kind == "rendezvous" else barrier(members)
    result = {
        "median_ms": round(statistics.median(seconds) * 1e3, 3),
        "rounds": len(seconds),
        "connect_ms": round(connecting * 1e3, 3),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
