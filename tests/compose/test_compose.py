"""docker-compose.yml as it is, on a real engine: workers in containers of their own train to the same weights, come what may.

Needs a Docker engine with Compose v2 and the image's base. Where no registry can be reached, BASE names an image that is
there and WHEELHOUSE a folder of wheels in the repository root (`pip download`), as docker-compose.yml says.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ferrorpc.cli.authority import Authority
from ferrorpc.wire.identity import Identity, Role
from tests.deploy.test_pages import commands

ROOT = Path(__file__).resolve().parents[2]
PROJECT = f"ferrorpc-test-{os.getpid()}"
WORKERS = 4
EPOCHS_OF_A_LONG_JOB = "90"
pytestmark = [pytest.mark.compose, pytest.mark.timeout(600)]


def compose(
    *arguments: str,
    seconds: float = 120,
    check: bool = True,
    variables: dict[str, str] | None = None,
    over: tuple[str, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Runs docker compose on this project, with these files over docker-compose.yml."""
    environment = {**os.environ, "WORKERS": str(WORKERS), "EPOCHS": "12", "FERRORPC_IMAGE": f"{PROJECT}-image"}
    engine = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    environment |= {"HEALTH_INTERVAL": "2s"}  # The first look comes after it: each start of a coordinator would take 5 s.
    environment |= {"PAGE_PORT": "0", "DOCKER_SOCKET": engine.removeprefix("unix://"), **(variables or {})}
    files = [word for file in ("docker-compose.yml", *over) for word in ("--file", str(ROOT / file))]
    command = ["docker", "compose", "--project-name", PROJECT, *files, *arguments]
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


def assert_that_the_job_ends_well(seconds: float, count: int = WORKERS) -> None:
    """All workers exit with 0 in that time, and say that they trained to the same weights."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(worker["State"] != "exited" for worker in workers()):
        time.sleep(1)
    logs = compose("logs", "--no-log-prefix", "worker").stdout
    assert [(worker["State"], worker["ExitCode"]) for worker in workers()] == [("exited", 0)] * count, logs
    assert f"identical weights on {count} ranks" in logs
    assert "test accuracy 0.9" in logs


def status(job: str) -> dict[str, Any]:
    """What the coordinator knows of a job, as soon as it answers."""
    deadline = time.monotonic() + 30
    while True:
        result = compose("exec", "-T", "coordinator", "ferrorpc", "status", "--job", job, "--json", check=False)
        if result.returncode == 0:
            found: dict[str, Any] = json.loads(result.stdout)
            return found
        assert time.monotonic() < deadline, result.stderr
        time.sleep(0.3)


def test_nothing_in_a_container_runs_as_root(stack: None) -> None:
    compose("up", "--detach", "--wait", "coordinator")
    assert compose("exec", "-T", "coordinator", "id", "-u").stdout.strip() == "10001"


def test_the_status_page_and_the_metrics_are_served(stack: None) -> None:
    compose("up", "--detach", "--wait", "coordinator")
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:29701/metrics', timeout=5).read().decode())"
    assert "ferrorpc_sessions " in compose("exec", "-T", "coordinator", "python", "-c", ask).stdout
    assert compose("port", "coordinator", "29701").stdout.startswith("127.0.0.1:")


def test_a_killed_worker_is_started_again_and_the_job_ends_well(stack: None) -> None:
    compose("rm", "--stop", "--force", "worker")
    compose("up", "--detach", "--wait", "coordinator")
    compose("up", "--detach", "worker", variables={"JOB": "fixed", "EPOCHS": EPOCHS_OF_A_LONG_JOB})
    until(lambda: min(steps("fixed"), default=0) > 0)
    killed = workers()[0]["ID"]
    for verb in ("kill", "start"):
        subprocess.run(["docker", verb, killed], check=True, capture_output=True, timeout=60)
    assert_that_the_job_ends_well(120)
    generations = status("fixed")["generations"]
    assert len(generations) >= 2
    assert {generation["size"] for generation in generations} == {WORKERS}


def steps(job: str) -> list[int]:
    """The step counter of every rank that is there."""
    members = status(job).get("members", [])
    return [member["step"] for member in members if member["state"] == "MEMBER_STATE_ACTIVE"]


def until(what: Callable[[], bool], seconds: float = 60) -> None:
    """Waits for it."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, compose("logs", "--tail", "30").stdout
        time.sleep(0.3)


ELASTIC = {"JOB": "elastic", "EXAMPLE": "digits_elastic", "WORLD": "2:6", "EPOCHS": "1000000"}


def sizes() -> list[int]:
    """How many members each generation of the elastic job had, the newest last."""
    return [one["size"] for one in status("elastic").get("generations", [])]


@pytest.fixture(scope="module")
def elastic(stack: None) -> None:
    """A job without end whose world may have two to six members, four of which are there."""
    compose("rm", "--stop", "--force", "worker")
    compose("up", "--detach", "--wait", "coordinator")
    compose("up", "--detach", "worker", variables=ELASTIC)
    until(lambda: sizes()[-1:] == [4])


def test_more_workers_are_let_in_by_a_job_that_runs(elastic: None) -> None:
    compose("up", "--detach", "--no-recreate", "--scale", "worker=6", "worker", variables=ELASTIC)
    until(lambda: sizes()[-1] == 6)


@pytest.mark.parametrize("fault", ["kill", "pause", "disconnect"])
def test_the_others_go_on_without_a_worker_until_it_is_back(elastic: None, fault: str) -> None:
    before = len(sizes())
    compose("--profile", "chaos", "run", "--rm", "chaos", fault, variables=ELASTIC)
    until(lambda: sizes()[before:][:1] == [5] and sizes()[-1] == 6)


def test_nobody_notices_that_the_coordinator_was_restarted(elastic: None) -> None:
    before, then = status("elastic")["position"], sizes()
    compose("restart", "coordinator")
    after = status("elastic")["position"]
    assert (after["cluster_id"], after["epoch"]) == (before["cluster_id"], before["epoch"] + 1)
    assert after["generation"] == before["generation"]
    assert sizes() == then


def test_nobody_notices_that_the_coordinator_was_out_of_reach(elastic: None) -> None:
    before = sizes()
    coordinator = compose("ps", "--quiet", "coordinator").stdout.strip()
    network = ("docker", "network")
    for change, seconds in ((("disconnect",), 8), (("connect", "--alias", "coordinator"), 3)):
        subprocess.run([*network, *change, f"{PROJECT}_job", coordinator], check=True, capture_output=True, timeout=60)
        time.sleep(seconds)
    assert "the coordinator may be cut off" in compose("logs", "coordinator").stdout
    until(lambda: len(steps("elastic")) == 6)
    assert sizes() == before


def test_the_job_that_went_through_all_that_ends_well(elastic: None) -> None:
    compose("kill", "--signal", "SIGUSR1", "worker")
    assert_that_the_job_ends_well(60, 6)


def test_the_coordinator_drains_and_comes_back_with_its_journal(elastic: None) -> None:
    before = status("elastic")["position"]
    compose("stop", "coordinator")
    stopped = json.loads(compose("ps", "--all", "--format", "json", "coordinator").stdout.splitlines()[0])
    assert stopped["ExitCode"] == 0
    compose("up", "--detach", "coordinator")
    after = status("elastic")["position"]
    assert (after["cluster_id"], after["generation"]) == (before["cluster_id"], before["generation"])
    assert after["epoch"] == before["epoch"] + 1


def test_a_job_trains_over_mutual_tls(stack: None, tmp_path: Path) -> None:
    tls, over = {"JOB": "secret", "CERTS": str(tmp_path)}, ("deploy/compose/tls.yml",)
    authority = Authority.make(tmp_path, 1)
    for role in (Role.COORDINATOR, Role.WORKER):
        authority.issue(role, [Identity("secret", role)], [], datetime.timedelta(hours=1), tmp_path)
        os.chown(tmp_path / f"{role}.key", 10001, -1)
    tmp_path.chmod(0o755)
    compose("rm", "--stop", "--force", "worker", "coordinator")
    compose("up", "--detach", "--wait", "coordinator", variables=tls, over=over)
    compose("up", "--detach", "worker", variables=tls, over=over)
    assert_that_the_job_ends_well(120)
    stranger = ("run", "--rm", "--no-deps", "--entrypoint", "ferrorpc", "worker", "health", "--addr", "coordinator:29700")
    assert compose(*stranger, check=False).returncode != 0, "a process without certificates was answered"
    fresh = tmp_path / "fresh"
    authority.issue(Role.COORDINATOR, [Identity("secret", Role.COORDINATOR)], [], datetime.timedelta(hours=2), fresh)
    for path in fresh.iterdir():  # as `cp` does, and the page says: a file that is put in the place of another is not seen
        shutil.copyfile(path, tmp_path / path.name)
    seen = compose("exec", "-T", "coordinator", "cat", "/run/secrets/coordinator_cert", variables=tls, over=over).stdout
    assert seen == (fresh / "coordinator.pem").read_text()
    compose("exec", "-T", "coordinator", "ferrorpc", "health", "--addr", "127.0.0.1:29700", variables=tls, over=over)
    compose("rm", "--stop", "--force", "worker", "coordinator")


@pytest.mark.parametrize("command", commands("compose.md"))
def test_the_commands_of_the_page_work(stack: None, command: str) -> None:
    assigned, arguments = re.fullmatch(r"((?:[A-Z]+=\S+ )*)docker compose (.+)", command).groups()
    variables = dict(word.split("=", 1) for word in assigned.split())
    compose(*arguments.split(), seconds=400, variables=variables)
