"""init_process_group in a world of one: what it makes of a group that was left open, and of torch's arguments."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

import ferrorpc
from ferrorpc import ConfigError, CoordinatorUnavailableError, UsageError
from ferrorpc.bootstrap import process_group
from ferrorpc.bootstrap.environment import LaunchInfo, detect_launch
from ferrorpc.bootstrap.process_group import _address_now, _job_of_run
from ferrorpc.config import Config
from ferrorpc.transports.grpc.server import WorkerServer


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FERRORPC_COORDINATOR", "FERRORPC_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_group_that_somebody_holds_is_to_be_closed_or_used() -> None:
    with ferrorpc.init_process_group() as group:
        with pytest.raises(UsageError, match=r"has an open group already\ntry: use the group that the first call returned"):
            ferrorpc.init_process_group()
        assert group.all_reduce(2.0) == 2.0


def test_a_group_that_is_interrupted_while_it_is_made_closes_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def strike(backend: object, timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ferrorpc.bootstrap.process_group.ProcessGroup", strike)
    monkeypatch.setattr("ferrorpc.backends.simulated.SimulatedBackend.close", lambda backend: closed.append(backend.name))
    with pytest.raises(KeyboardInterrupt):
        ferrorpc.init_process_group()
    assert closed == ["simulated"]


@pytest.mark.parametrize("name", ["gloo", "cpu:gloo,cuda:nccl", "mpi"])
def test_a_backend_of_torchs_is_told_ferrorpcs_counterpart(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not one of auto(.|\n)*try: leave it out.*\"grpc\""):
        ferrorpc.init_process_group(backend=name)


def test_a_backend_of_nobodys_is_not_taken_for_one_of_torchs() -> None:
    with pytest.raises(ConfigError, match="is not one of auto") as raised:
        ferrorpc.init_process_group(backend="grcp")
    assert 'pass "grpc"' not in str(raised.value)


def test_an_algorithm_of_nobodys_is_refused_by_where_it_was_given() -> None:
    with pytest.raises(ConfigError, match=r"^algorithm='all_reduce=rign' \(from argument\): all_reduce has no algorithm"):
        ferrorpc.init_process_group(algorithm="all_reduce=rign")


def test_a_world_without_a_coordinator_is_told_who_starts_one() -> None:
    with pytest.raises(ConfigError, match=r"try: .*ferrorpc run -n 2"):
        ferrorpc.init_process_group(world_size=2)


@pytest.mark.parametrize("settings", [{"coordinator": "127.0.0.1:0"}, {"port": 0}])
def test_port_0_is_no_port_that_ranks_could_dial(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """A wait for somebody there would end after the timeout, with exit code 75, as if a retry could help."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:0:(.|\n)*FERRORPC_COORDINATOR.*FERRORPC_PORT"):
        ferrorpc.init_process_group(timeout=0.2, **settings)


@pytest.mark.parametrize(
    ("settings", "launch", "job"),
    [
        ({}, LaunchInfo("RANK and WORLD_SIZE", (8, 8), local_size=4, run_id="run7"), "run-run7"),
        ({}, LaunchInfo("RANK and WORLD_SIZE", (8, 8), local_size=8, run_id="run7"), "run-run7"),
        ({"job": "trial"}, LaunchInfo("RANK and WORLD_SIZE", (8, 8), local_size=4, run_id="run7"), "trial"),
        ({}, LaunchInfo("PMI_RANK and PMI_SIZE", (4, 4), local_size=4, launcher_variable="PMI_RANK"), "run-4711-PMI_RANK"),
        ({}, LaunchInfo("PMI_RANK and PMI_SIZE", (4, 4), local_size=2, launcher_variable="PMI_RANK"), "default"),
    ],
)
def test_a_job_that_nobody_named_is_named_after_its_run_where_that_is_known(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], launch: LaunchInfo, job: str
) -> None:
    monkeypatch.setattr("ferrorpc.bootstrap.process_group.launcher_process_id", lambda name: f"4711-{name}")
    assert _job_of_run(Config(settings, {}), launch) == job


@pytest.mark.parametrize(("settings", "warned"), [({}, True), ({"world_size": 1}, False)])
def test_a_rank_that_a_script_spawns_itself_is_told_that_it_is_alone(
    capfd: pytest.CaptureFixture[str], settings: dict[str, Any], warned: bool
) -> None:
    """As by torch.multiprocessing.spawn: every one of these ranks would train the whole model for itself."""
    child = multiprocessing.get_context("spawn").Process(target=ferrorpc.init_process_group, kwargs=settings)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert ("world of one" in capfd.readouterr().err) is warned


@pytest.mark.parametrize(
    ("settings", "moved"),
    [({"bind": "0.0.0.0"}, True), ({"bind": "0.0.0.0", "advertise": "10.0.0.1"}, False), ({"bind": "127.0.0.1"}, False)],
    ids=["any", "advertised", "loopback"],
)
def test_a_worker_that_listens_everywhere_is_dialled_at_its_address_of_today(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], moved: bool
) -> None:
    monkeypatch.setattr("ferrorpc.bootstrap.address._route", lambda host, port: "10.0.0.9")
    server = WorkerServer("127.0.0.1", "10.0.0.1")
    port = server.address.rpartition(":")[2]
    address = _address_now(server, "192.0.2.1:29700", Config(settings, {}))
    server.close()
    assert address == server.address == f"10.0.0.{9 if moved else 1}:{port}"


def test_streams_to_peers_last_as_long_as_the_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "RemoteSession", lambda *_, **__: SimpleNamespace(on_leave=lambda close: None))
    settings = Config({"coordinator": "127.0.0.1:9", "world_size": "2", "lease": 40.0}, {})
    _, server = process_group._session(settings, detect_launch({}, settings))
    server.close()
    assert server._lease_seconds == 40.0


def test_an_address_of_no_use_to_peers_is_waited_out_by_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that it has for a second, while its network comes back, ended its session for good."""
    monkeypatch.setattr("ferrorpc.bootstrap.address._route", lambda host, port: "fe80::1")
    server = WorkerServer("127.0.0.1", "10.0.0.1")
    with pytest.raises(CoordinatorUnavailableError, match="link-local"):
        _address_now(server, "192.0.2.1:29700", Config({"bind": "::"}, {}))
    server.close()
