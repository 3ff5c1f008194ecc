"""Starts and controls the rank processes of one measured system."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ferrorpc.cli.bench.case import Case, Contender, System
from ferrorpc.cli.bench.orderly_end import ended_in_order
from ferrorpc.cli.launcher.exec_shim import tied_to_this_process
from ferrorpc.cli.ports import held_ports
from ferrorpc.errors import BackendUnavailableError, CollectiveTimeoutError, FerroError, PeerLostError

START_SECONDS: Final = 90.0
REPLY_SECONDS: Final = 120.0
END_SECONDS: Final = 5.0
STDERR_LINES: Final = 8
STDERR_BYTES: Final = 65_536
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
_WORKER: Final = "ferrorpc.cli.bench.worker"
_JOB_VARIABLES: Final = ("FERRORPC_", "TORCHELASTIC_", "PET_", "SLURM_", "OMPI_", "PMI_", "GLOO_", "MPICH_", "HYDRA_")


@dataclass(frozen=True, slots=True)
class Host:
    """The host that a rank runs on.

    Attributes:
        prefix: beginning of its command line, such as ("ip", "netns", "exec", "left").
        address: where the others reach it.
        interface: the network interface with that address.
    """

    prefix: tuple[str, ...] = ()
    address: str = "127.0.0.1"
    interface: str = "lo"


LOCAL: Final = Host()


class _RankConnection:
    """The connection to one rank process."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.stream = sock.makefile("rw", encoding="utf-8")

    def line(self) -> str:
        """The next line; "" if the process ended before it was complete."""
        try:
            text = self.stream.readline()
        except OSError:  # it ended without reading what was sent to it
            return ""
        return text if text.endswith("\n") else ""


class RankProcesses:
    """The running rank processes of a system; a context manager. Between commands they are blocked in a read.

    They end with this process, however that ends; make it on the main thread.

    Args:
        hosts: one for each rank. Systems started by mpiexec run on this machine only.
        pin: rank r is pinned to CPU r, modulo the number of CPUs.

    Raises:
        BackendUnavailableError: the system is not installed, or did not start; the message quotes its standard error.
    """

    def __init__(self, system: System, ranks: int, *, hosts: Sequence[Host] = (), pin: bool = False) -> None:
        require(system)
        self.system = system
        self.version = ""
        self._hosts = hosts or [LOCAL] * ranks
        self._held = contextlib.ExitStack()
        """What the processes need until they have ended."""
        self._stderr = self._held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  the stack closes it
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[_RankConnection] = []
        self._broken = False
        try:
            self._start(ranks, dict(system.settings) | ({"pin": True} if pin else {}))
        except BaseException:
            self._end()
            raise

    def prepare(self, case: Case, contender: Contender) -> tuple[int, int]:
        """Allocates a case's arrays on every rank. Returns the minimum and maximum number of repetitions in a block.

        Raises:
            BackendUnavailableError: the system lacks the operation, dtype or kind of memory.
        """
        replies = self.ask("prepare", case=case.to_json(), memory=contender.memory, wire=contender.wire)
        return max(int(reply["repeats_min"]) for reply in replies), min(int(reply["repeats_max"]) for reply in replies)

    def ask(self, command: str, *, deadline_seconds: float = REPLY_SECONDS, **fields: Any) -> list[dict[str, Any]]:
        """Sends a command to every rank. Returns the replies in rank order.

        Raises:
            BackendUnavailableError: every rank refused; the processes remain usable.
            PeerLostError: a rank ended, or failed alone; the processes must be closed.
            CollectiveTimeoutError: not all replied in time.
        """
        text = json.dumps({"do": command, **fields}) + "\n"
        self._broken = True  # until all ranks have replied
        for rank, connection in enumerate(self._connections):
            try:
                connection.stream.write(text)
                connection.stream.flush()
            except OSError:
                raise self._lost(rank, "its process ended") from None
        replies = self._replies(time.monotonic() + deadline_seconds)
        failed = {rank: str(reply["error"]) for rank, reply in enumerate(replies) if "error" in reply}
        if 0 < len(failed) < len(replies):
            raise self._lost(*failed.popitem())
        self._broken = False
        if failed:
            raise BackendUnavailableError(failed[0], "measure without it, or fix what it reports")
        return replies

    def close(self) -> None:
        """Shuts the ranks down; kills them after END_SECONDS or an error. Idempotent."""
        try:
            if self._connections and not self._broken:
                self.ask("close", deadline_seconds=END_SECONDS)
                for process in self._processes:
                    process.wait(END_SECONDS)
        except (FerroError, OSError, subprocess.TimeoutExpired):
            pass
        finally:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self, ranks: int, settings: dict[str, Any]) -> None:
        # The directory is gone once all ranks have connected, so that a driver that is killed later leaves nothing behind.
        with (
            ended_in_order(),
            tempfile.TemporaryDirectory(prefix="ferrorpc-bench-") as directory,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            address = f"{directory}/driver"
            listener.bind(address)
            listener.listen(ranks)
            # -P: the user's directory must not shadow what ranks import. Other runners than ours are found there.
            isolated = ["-P"] if self.system.runner.startswith("ferrorpc.") else []
            worker = [sys.executable, *isolated, "-m", _WORKER, self.system.runner, address, json.dumps(settings)]
            for command, environment in self._commands(worker, ranks):
                self._processes.append(
                    subprocess.Popen(
                        tied_to_this_process(command),
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=self._stderr,
                        stderr=self._stderr,
                        start_new_session=True,
                    )
                )
            deadline = time.monotonic() + START_SECONDS
            while len(self._connections) < ranks:
                self._connections.append(_RankConnection(self._accept(listener, deadline)))
        try:
            greetings = self._replies(deadline)
        except PeerLostError as lost:
            raise self._did_not_start(f"a rank failed: {lost.reason}") from None
        except CollectiveTimeoutError:
            raise self._did_not_start(f"not all ranks were ready after {START_SECONDS:.0f} s") from None
        errors = [str(greeting["error"]) for greeting in greetings if "error" in greeting]
        if errors:
            raise BackendUnavailableError(f"{self.system.name} did not start: {errors[0]}", "measure without it")
        in_order = sorted(zip(greetings, self._connections, strict=True), key=lambda pair: int(pair[0]["rank"]))
        self.process_ids = [int(greeting["pid"]) for greeting, _ in in_order]
        self._connections = [connection for _, connection in in_order]
        self.version = str(greetings[0]["version"])

    def _commands(self, worker: list[str], ranks: int) -> Iterator[tuple[list[str], dict[str, str]]]:
        base = {name: value for name, value in os.environ.items() if not name.startswith(_JOB_VARIABLES)}
        if self.system.through_mpiexec:
            yield [mpiexec(), "-n", str(ranks), *worker], base | _ONE_THREAD
            return
        ports = self._held.enter_context(held_ports(0, 0))
        for rank, host in enumerate(self._hosts):
            yield [*host.prefix, *worker], base | rank_variables(rank, self._hosts, ports)

    def _accept(self, listener: socket.socket, deadline: float) -> socket.socket:
        """The next rank's connection. Checks twice a second that all processes still run."""
        while time.monotonic() < deadline:
            if select.select([listener], [], [], 0.5)[0]:
                return listener.accept()[0]
            ended = [process for process in self._processes if process.poll() is not None]
            if ended:
                raise self._did_not_start(f"a rank ended with code {ended[0].returncode}")
        raise self._did_not_start(f"not all ranks ran after {START_SECONDS:.0f} s")

    def _replies(self, deadline: float) -> list[dict[str, Any]]:
        """One reply from every rank, in the order of the connections."""
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < len(self._connections):
            waiting = {connection.sock: number for number, connection in enumerate(self._connections) if number not in replies}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._overdue(sorted(waiting.values()), replies)
            for each in ready:
                text = self._connections[waiting[each]].line()
                if not text:
                    raise self._lost(waiting[each], "its process ended")
                replies[waiting[each]] = json.loads(text)
                if "error" in replies[waiting[each]]:
                    deadline = min(deadline, time.monotonic() + END_SECONDS)  # the others may be waiting for the failed rank
        return [replies[number] for number in range(len(self._connections))]

    def _overdue(self, ranks: list[int], replies: dict[int, dict[str, Any]]) -> FerroError:
        for rank, reply in replies.items():
            if "error" in reply:
                return self._lost(rank, str(reply["error"]))
        text = f"ranks {ranks} of {self.system.name} did not reply in time{self._stderr_tail()}"
        return CollectiveTimeoutError(ranks, text, hint="measure without it, or smaller sizes")

    def _lost(self, rank: int, reason: str) -> PeerLostError:
        text = f"rank {rank} of {self.system.name} failed: {reason}{self._stderr_tail()}"
        return PeerLostError(rank, reason, text, hint="measure without it, or fix what it reports")

    def _did_not_start(self, why: str) -> BackendUnavailableError:
        return BackendUnavailableError(f"{self.system.name} did not start: {why}{self._stderr_tail()}", "measure without it")

    def _stderr_tail(self) -> str:
        # pread: the ranks write where this file's one offset stands, so it must not be moved.
        size = os.fstat(self._stderr.fileno()).st_size
        text = os.pread(self._stderr.fileno(), STDERR_BYTES, max(0, size - STDERR_BYTES)).decode(errors="replace")
        lines = text.splitlines()[-STDERR_LINES:]
        return "".join(f"\n  | {line}" for line in lines)

    def _end(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):  # data that could not be sent to a rank that has ended
                connection.stream.close()
            connection.sock.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._connections.clear()
        self._processes.clear()
        self._held.close()


def require(system: System) -> None:
    """Raises BackendUnavailableError unless a system's packages are installed."""
    missing = [name for name in system.needs if find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(f"{', '.join(missing)} is not installed", "see docs/benchmarks.md")
    if system.through_mpiexec:
        mpiexec()


def mpiexec() -> str:
    """MPI's launcher: the one beside the interpreter, where wheels install it, else the one on the PATH."""
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if found is None:
        raise BackendUnavailableError("there is no mpiexec", "pip install mpich")
    return found


def rank_variables(rank: int, hosts: Sequence[Host], ports: Sequence[int]) -> dict[str, str]:
    """The variables by which a rank that computes in one thread finds the others.

    Args:
        hosts: of all ranks.
        ports: a free one of the first host for MASTER_PORT, and one for the coordinator.
    """
    host = hosts[rank]
    return _ONE_THREAD | {
        "RANK": str(rank), "WORLD_SIZE": str(len(hosts)), "MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(ports[0]),
        "LOCAL_WORLD_SIZE": str(sum(other.address == host.address for other in hosts)), "FERRORPC_PORT": str(ports[1]),
        "FERRORPC_BIND": host.address, "FERRORPC_INSECURE": "1", "GLOO_SOCKET_IFNAME": host.interface,
    }  # fmt: skip
