"""A real coordinator process for tests, and members of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from ferrorpc.config import Config
from ferrorpc.coordination.session import RemoteSession
from tests.integration.ports import lasting_port
from tests.threads import in_threads, results_of


class Service:
    """`python -m ferrorpc_coordinator` on a free port; killed and started again on the same one at will."""

    def __init__(self, data_dir: Path | None = None, *flags: str) -> None:
        self._flags = [*flags, *(["--data-dir", str(data_dir)] if data_dir else [])]
        self.address = f"127.0.0.1:{lasting_port()}"
        self.cluster_id = ""
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it listens."""
        command = [sys.executable, "-m", "ferrorpc_coordinator", "--listen", self.address, *self._flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        assert words[0] == "listening", words
        self.address, self.cluster_id = words[1], words[3]

    def kill(self) -> None:
        """As kill -9 does it."""
        self.process.kill()
        self._end()

    def stop(self) -> None:
        """As an orchestrator does it."""
        if self.process.poll() is None:
            self.process.terminate()
            self._end()

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def _end(self) -> None:
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()


def join(address: str, rank: int, size: int | tuple[int, int], **more: Any) -> RemoteSession:
    """One member; `more` are arguments of RemoteSession or settings."""
    policy = (size, size) if isinstance(size, int) else size
    names = ("job", "name", "pinned_rank", "hinted_rank", "labels", "worker_address")
    arguments = {name: more.pop(name) for name in names if name in more}
    if policy[0] == policy[1]:
        arguments.setdefault("pinned_rank", rank)
    config = Config({"timeout": 20.0} | more, {})
    return RemoteSession(
        address,
        job=arguments.pop("job", "trial"),
        name=arguments.pop("name", f"member-{rank}"),
        policy=policy,
        hinted_rank=arguments.pop("hinted_rank", rank),
        config=config,
        **arguments,
    ).join()


def join_all(address: str, size: int, policy: tuple[int, int] | None = None, **more: Any) -> list[RemoteSession]:
    """A whole world of members in this process, in rank order."""
    sessions = results_of(in_threads(size, lambda rank: join(address, rank, policy or size, **more)))
    return sorted(sessions, key=lambda session: session.membership.assignment.rank)
