"""What the profile `chaos` of docker-compose.yml runs: does to workers of its own project what happens to machines.

    chaos.py kill | pause | disconnect [--seconds 8]     one fault to one worker, mended after that time
    chaos.py random [--seconds 8] [--rounds 0] [--seed 0]    one after the other; 0 rounds: without end

Ctrl-C and `docker stop` end it at once, and mend the fault first.

It speaks to the engine through its socket, which is power over the whole machine: that is why nobody starts it unasked.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import sys
import urllib.parse
from collections.abc import Callable
from typing import Any

SOCKET = "/var/run/docker.sock"
ENGINE_SECONDS = 30.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""They are blocked, and taken only during waits: a request in flight is answered, so that what it did is known and mended."""


class Engine(http.client.HTTPConnection):
    """The Docker engine behind its Unix socket."""

    def __init__(self) -> None:
        super().__init__("localhost", timeout=ENGINE_SECONDS)

    def connect(self) -> None:
        """Opens the socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ENGINE_SECONDS)
        try:
            self.sock.connect(SOCKET)
        except OSError as problem:
            sys.exit(f"no engine answers at {SOCKET}: {problem}\ntry: set DOCKER_SOCKET to the socket of the host's engine")


def ask(method: str, path: str, body: Any = None) -> Any:
    """One request to the engine; returns what it answers, from JSON.

    Raises:
        RuntimeError: it refused, and why.
    """
    engine = Engine()
    try:
        engine.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        response = engine.getresponse()
        text = response.read().decode()
    finally:
        engine.close()
    if response.status >= http.client.BAD_REQUEST:
        raise RuntimeError(f"{method} {path}: {response.status} {text.strip()}")
    return json.loads(text) if text else None


def project() -> str:
    """The Compose project that this container belongs to."""
    mine = ask("GET", f"/containers/{socket.gethostname()}/json")
    name: str = mine["Config"]["Labels"]["com.docker.compose.project"]
    return name


def workers(name: str) -> list[dict[str, Any]]:
    """The project's workers that run."""
    labels = [f"com.docker.compose.project={name}", "com.docker.compose.service=worker"]
    filters = urllib.parse.quote(json.dumps({"label": labels, "status": ["running"]}))
    found: list[dict[str, Any]] = ask("GET", f"/containers/json?filters={filters}")
    return sorted(found, key=lambda container: str(container["Names"]))


def kill(worker: dict[str, Any], wait: Callable[[], None]) -> None:
    """The process ends at once; nobody starts it again before the time is over."""
    ask("POST", f"/containers/{worker['Id']}/kill")
    try:
        wait()
    finally:
        ask("POST", f"/containers/{worker['Id']}/start")


def pause(worker: dict[str, Any], wait: Callable[[], None]) -> None:
    """The process stands still, as on a machine that is out of memory."""
    ask("POST", f"/containers/{worker['Id']}/pause")
    try:
        wait()
    finally:
        ask("POST", f"/containers/{worker['Id']}/unpause")


def disconnect(worker: dict[str, Any], wait: Callable[[], None]) -> None:
    """The process goes on, but nobody reaches it, nor it anybody."""
    (name,) = worker["NetworkSettings"]["Networks"]
    ask("POST", f"/networks/{name}/disconnect", {"Container": worker["Id"], "Force": True})
    try:
        wait()
    finally:
        ask("POST", f"/networks/{name}/connect", {"Container": worker["Id"]})


FAULTS = {fault.__name__: fault for fault in (kill, pause, disconnect)}


def main() -> None:
    """One fault, or one after the other."""
    parser = argparse.ArgumentParser(description="faults for the workers of a Compose project")
    parser.add_argument("fault", choices=[*FAULTS, "random"])
    parser.add_argument("--seconds", type=float, default=8.0, help="how long a fault lasts, and the time in between")
    parser.add_argument("--rounds", type=int, default=0, help="of `random`; 0 for no end")
    parser.add_argument("--seed", type=int, default=0, help="of `random`")
    options = parser.parse_args()
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    choose = random.Random(options.seed)

    def wait() -> None:
        stopped = signal.sigtimedwait(STOP_SIGNALS, options.seconds)
        if stopped is not None:
            sys.exit(128 + stopped.si_signo)

    name, done = project(), 0
    while True:
        there = workers(name)
        if not there:
            sys.exit(f"no worker of {name} runs")
        worker = choose.choice(there)
        fault = options.fault if options.fault != "random" else choose.choice(list(FAULTS))
        print(f"{fault} {worker['Names'][0].strip('/')}", flush=True)
        FAULTS[fault](worker, wait)
        done += 1
        if options.fault != "random" or done == options.rounds:
            return
        wait()


if __name__ == "__main__":
    main()
