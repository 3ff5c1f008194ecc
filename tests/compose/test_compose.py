"""docker-compose.yml as it is, on a real engine: four workers in containers of their own train to the same weights.

Needs a Docker engine with Compose v2 and the image's base. Where no registry can be reached, BASE names an image that is
there and WHEELHOUSE a folder of wheels in the repository root (`pip download`), as docker-compose.yml says.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"ferrorpc-test-{os.getpid()}"
WORKERS = 4
pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


def compose(*arguments: str, seconds: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs docker compose on this project."""
    environment = {**os.environ, "WORKERS": str(WORKERS), "EPOCHS": "12", "FERRORPC_IMAGE": f"{PROJECT}-image"}
    command = ["docker", "compose", "--project-name", PROJECT, "--file", str(ROOT / "docker-compose.yml"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    assert not check or result.returncode == 0, f"{' '.join(arguments)}: {result.stdout[-4000:]}{result.stderr[-4000:]}"
    return result


def why_not() -> str | None:
    """Why no containers can be started here; None when they can."""
    if shutil.which("docker") is None:
        return "there is no docker command"
    for command, needs in ((["docker", "compose", "version"], "Compose v2"), (["docker", "info"], "a running Docker engine")):
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if result.returncode != 0:
            return f"needs {needs}: {(result.stderr or result.stdout).strip().splitlines()[-1]}"
    return None


@pytest.fixture(scope="module")
def stack() -> Iterator[None]:
    """The built image; whatever was started is gone afterwards."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    try:
        compose("build", seconds=400)
        yield
    finally:
        compose("down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
        image = f"{PROJECT}-image"
        subprocess.run(["docker", "image", "rm", "--force", image], capture_output=True, timeout=60, check=False)


def workers() -> list[dict[str, Any]]:
    """State and exit code of every worker's container."""
    return [json.loads(line) for line in compose("ps", "--all", "--format", "json", "worker").stdout.splitlines()]


def test_four_workers_in_containers_end_with_identical_weights(stack: None) -> None:
    compose("up", "--detach", "--wait", "coordinator")
    compose("up", "--detach", "worker")
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and any(worker["State"] != "exited" for worker in workers()):
        time.sleep(1)
    logs = compose("logs", "--no-log-prefix", "worker").stdout
    assert [worker["ExitCode"] for worker in workers()] == [0] * WORKERS, logs
    assert f"identical weights on {WORKERS} ranks" in logs
    assert "test accuracy 0.9" in logs


def status() -> dict[str, Any]:
    """What the coordinator knows of the job."""
    compose("up", "--detach", "--wait", "coordinator")
    found: dict[str, Any] = json.loads(
        compose("exec", "-T", "coordinator", "ferrorpc", "status", "--job", "digits", "--json").stdout
    )
    return found


def test_the_coordinator_tells_of_the_job_that_is_over(stack: None) -> None:
    found = status()
    assert [generation["size"] for generation in found["generations"]] == [WORKERS]
    assert {member["state"] for member in found["members"]} == {"MEMBER_STATE_LEFT"}


def test_the_coordinator_drains_and_comes_back_with_its_journal(stack: None) -> None:
    before = status()["position"]
    compose("stop", "coordinator")
    stopped = json.loads(compose("ps", "--all", "--format", "json", "coordinator").stdout.splitlines()[0])
    assert stopped["ExitCode"] == 0
    after = status()["position"]
    assert (after["cluster_id"], after["generation"]) == (before["cluster_id"], before["generation"])
    assert int(after["epoch"]) == int(before["epoch"]) + 1


def test_nothing_in_a_container_runs_as_root(stack: None) -> None:
    compose("up", "--detach", "--wait", "coordinator")
    assert compose("exec", "-T", "coordinator", "id", "-u").stdout.strip() == "10001"
