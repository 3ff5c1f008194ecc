"""Measures the delay of the status page: from a change at the coordinator until a browser shows it, with many working ranks.

    python -m benchmarks.status_page [--ranks 4 100 1000] [--changes 20]

Coordinator, ranks (one process, one thread) and a headless Chromium share this machine. A change is a new barrier. It shows the
median and the longest delay, and the coordinator's share of a core with and without an open page.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import ferrorpc  # noqa: F401 (first: it sets environment variables that gRPC reads when it is imported)
from benchmarks.options import count
from tests.integration import chromium
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.crowd import Crowd

REST_SECONDS = 4.0


def processor_seconds(process: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def share(process: int) -> float:
    """The share of a core that a process uses, over a few seconds."""
    began, used = time.monotonic(), processor_seconds(process)
    time.sleep(REST_SECONDS)
    return (processor_seconds(process) - used) / (time.monotonic() - began)


def measure(ranks: int, changes: int) -> str:
    """Measures a world of this size. Returns one line of text."""
    over = threading.Event()
    coordinator = CoordinatorProcess("--http-port", "0")
    crowd = Crowd(coordinator.address, ranks, "page")

    def work() -> None:
        while not over.wait(0.05):
            for rank in crowd.ranks:
                rank.step += 1
                rank.activity = f"all_reduce #{rank.step}"

    worker = threading.Thread(target=work)
    worker.start()
    try:
        unwatched = share(coordinator.process.pid)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
            browser = chromium.Browser(Path(profile))
            browser.open(f"http://{coordinator.http_address}/?job=page")
            browser.until("document.querySelector('#headline').textContent.includes('work')", 60)
            watched = share(coordinator.process.pid)
            waits = []
            for number in range(changes):
                began = time.monotonic()
                crowd.barrier(f"change-{number}", [0])
                browser.until(f"document.querySelector('#barriers').textContent.includes('change-{number}')", 60)
                waits.append(time.monotonic() - began)
                crowd.barrier(f"change-{number}", list(range(1, ranks)))
            browser.close()
    finally:
        over.set()
        worker.join()
        crowd.close()
        coordinator.stop()
    return (
        f"{ranks:6} ranks: shown after {statistics.median(waits):.2f} s (median), {max(waits):.2f} s (worst of {changes}); "
        f"coordinator uses {watched:.0%} of a core with a page open, {unwatched:.0%} without"
    )


def main() -> None:
    """Measures each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=count, nargs="+", default=[4, 100, 1000])
    parser.add_argument("--changes", type=count, default=20)
    arguments = parser.parse_args()
    if chromium.executable() is None:
        parser.error(f"it needs a browser, one of {', '.join(chromium.NAMES)}; try: apt install chromium")
    for ranks in arguments.ranks:
        print(measure(ranks, arguments.changes), flush=True)


if __name__ == "__main__":
    main()
