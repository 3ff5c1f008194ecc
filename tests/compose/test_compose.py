"""docker-compose.yml as it is, on a real engine: four workers in containers of their own train to the same weights.

Needs a Docker engine with Compose v2 and the image's base. Where no registry can be reached, BASE names an image that is
there and WHEELHOUSE a folder of wheels in the repository root (`pip download`), as docker-compose.yml says.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.test_pages import commands

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"ferrorpc-test-{os.getpid()}"
WORKERS = 4
EPOCHS_OF_A_LONG_JOB = "150"
pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


def compose(
    *arguments: str, seconds: float = 120, check: bool = True, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs docker compose on this project."""
    environment = {**os.environ, "WORKERS": str(WORKERS), "EPOCHS": "12", "FERRORPC_IMAGE": f"{PROJECT}-image"}
    environment |= {"PAGE_PORT": "0", **(variables or {})}
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
    assert_that_the_job_ends_well(240)


def assert_that_the_job_ends_well(seconds: float) -> None:
    """All workers exit with 0 in that time, and say that they trained to the same weights."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker["State"] != "exited" for worker in workers()):
        time.sleep(1)
    logs = compose("logs", "--no-log-prefix", "worker").stdout
    assert [worker["ExitCode"] for worker in workers()] == [0] * WORKERS, logs
    assert f"identical weights on {WORKERS} ranks" in logs
    assert "test accuracy 0.9" in logs


def status(job: str = "digits") -> dict[str, Any]:
    """What the coordinator knows of a job."""
    compose("up", "--detach", "--wait", "coordinator")
    found: dict[str, Any] = json.loads(
        compose("exec", "-T", "coordinator", "ferrorpc", "status", "--job", job, "--json").stdout
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


def test_the_status_page_and_the_metrics_are_served(stack: None) -> None:
    compose("up", "--detach", "--wait", "coordinator")
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:29701/metrics', timeout=5).read().decode())"
    assert "ferrorpc_sessions " in compose("exec", "-T", "coordinator", "python", "-c", ask).stdout
    assert compose("port", "coordinator", "29701").stdout.startswith("127.0.0.1:")


@pytest.fixture
def training(stack: None, request: pytest.FixtureRequest) -> Iterator[str]:
    """A job in the midst of its training, by its name."""
    job = request.node.name.replace("_", "-")
    variables = {"JOB": job, "EPOCHS": EPOCHS_OF_A_LONG_JOB}
    try:
        compose("rm", "--stop", "--force", "worker")
        compose("up", "--detach", "--wait", "coordinator")
        compose("up", "--detach", "worker", variables=variables)
        deadline = time.monotonic() + 60
        while not steps(job) or min(steps(job)) < 20:
            assert time.monotonic() < deadline, compose("logs", "worker").stdout
            time.sleep(0.5)
        yield job
    finally:
        compose("rm", "--stop", "--force", "worker", check=False)


def steps(job: str) -> list[int]:
    """The step counter of every rank, once all are active."""
    result = compose("exec", "-T", "coordinator", "ferrorpc", "status", "--job", job, "--json", check=False)
    members = json.loads(result.stdout)["members"] if result.returncode == 0 else []
    active = [member for member in members if member["state"] == "MEMBER_STATE_ACTIVE"]
    return [int(member.get("step", 0)) for member in active] if len(active) == WORKERS else []


def docker(*arguments: str) -> None:
    """Runs docker."""
    subprocess.run(["docker", *arguments], check=True, capture_output=True, timeout=60)


def test_a_killed_worker_is_started_again_and_the_job_ends_well(training: str) -> None:
    docker("kill", workers()[0]["ID"])
    docker("start", next(worker["ID"] for worker in workers() if worker["State"] == "exited"))
    assert_that_the_job_ends_well(120)
    assert len(status(training)["generations"]) >= 2


def test_a_worker_that_stands_still_is_given_up_and_comes_back_when_it_goes_on(training: str) -> None:
    worker = workers()[0]["ID"]
    docker("pause", worker)
    try:
        deadline = time.monotonic() + 30
        while "MEMBER_STATE_DEAD" not in {member["state"] for member in status(training)["members"]}:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    finally:
        docker("unpause", worker)
    assert_that_the_job_ends_well(120)
    assert len(status(training)["generations"]) >= 2


def test_the_coordinator_restarts_in_the_midst_of_a_job_and_nobody_notices(training: str) -> None:
    before = status(training)["position"]
    compose("restart", "coordinator")
    after = status(training)["position"]
    assert (after["cluster_id"], int(after["epoch"])) == (before["cluster_id"], int(before["epoch"]) + 1)
    assert_that_the_job_ends_well(120)
    assert len(status(training)["generations"]) == 1


@pytest.mark.parametrize("command", commands("compose.md"))
def test_the_commands_of_the_page_work(stack: None, command: str) -> None:
    (arguments,) = re.fullmatch(r"docker compose (.+)", command).groups()
    compose(*arguments.split(), seconds=400)
