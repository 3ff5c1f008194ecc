"""Drives `lane_peer` processes: starts them, tells them what to do, waits for what they say."""

import contextlib
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import IO

from tests.integration.slow_link import slow_link

SECONDS = 30.0


class PeerHandle:
    """One rank in a process of its own."""

    def __init__(
        self,
        rank: int,
        prefix: Sequence[str] = (),
        hosts: Sequence[str] = (),
        environment: dict | None = None,
        stderr: IO[str] | None = None,
    ) -> None:
        self.rank = rank
        self.address = ""
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.integration.lane_peer", str(rank), *hosts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.rstrip())

    def tell(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, start: str, seconds: float = SECONDS) -> str:
        """The next line, which must begin with `start`."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"rank {self.rank} did not say {start!r} within {seconds} s") from None
        assert line.startswith(start), f"rank {self.rank} said {line!r} instead of {start!r}"
        return line

    def silent(self, seconds: float) -> bool:
        """Whether it says nothing for so long."""
        time.sleep(seconds)
        return self._lines.empty()

    def do(self, line: str) -> None:
        """Tells it, and waits until it has done so."""
        self.tell(line)
        self.hear(f"done {line.split()[0]}")

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def end(self) -> None:
        """Kills it, if it still runs, and closes its pipes."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


@contextlib.contextmanager
def peers(*handles: PeerHandle, bytes_per_second: int = 0) -> Iterator[list[PeerHandle]]:
    """Ranks that know each other's addresses, which may lead through slow links; none outlives the block."""
    with contextlib.ExitStack() as ends:
        for handle in handles:
            ends.callback(handle.end)
        for handle in handles:
            handle.address = handle.hear("at ").split()[1]
            if bytes_per_second:
                handle.address = ends.enter_context(slow_link(handle.address, bytes_per_second=bytes_per_second)).address
        for handle in handles:
            handle.tell(" ".join(other.address for other in handles))
        yield list(handles)
