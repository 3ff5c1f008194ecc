"""The findings of `ferrorpc doctor`, on healthy and unhealthy machines."""

import datetime
import errno
import os
import socket
import sys
from pathlib import Path

import pytest

from ferrorpc.cli import doctor
from ferrorpc.cli.doctor import run_checks
from ferrorpc.cli.main import run
from ferrorpc.collectives.tuning import packaged_table
from ferrorpc.config import Config
from ferrorpc.wire.identity import Role


def found(topic, environment=None, **settings):
    """The findings on one topic."""
    return [one for one in run_checks(Config(settings, {}), environment or {}) if one.topic == topic]


def states(topic, environment=None, **settings):
    return [one.state for one in found(topic, environment, **settings)]


@pytest.fixture
def nobody():
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
    return address


def test_every_finding_that_is_bad_says_what_to_do(nobody):
    settings = {"coordinator": nobody, "tls_cert": "/nowhere", "tls_key": "/nowhere", "tls_ca": "/nowhere", "backend": "nccl"}
    bad = [one for one in run_checks(Config(settings, {}), {}) if one.state == "bad"]
    assert len(bad) >= 2
    assert all(one.fix and "\n" not in str(one) for one in bad)


@pytest.mark.parametrize(("grpcio", "notes"), [("1.81.2", 1), ("1.82.0", 0)])
def test_a_grpcio_that_bounds_no_floods_is_noted(monkeypatch, grpcio, notes):
    monkeypatch.setattr(doctor, "version_of", lambda package: grpcio if package == "grpcio" else "1")
    noted = [one for one in found("versions") if one.state == "note"]
    assert len(noted) == notes
    assert all("grpcio>=1.82" in one.fix for one in noted)


def test_a_coordinator_that_is_not_there_is_bad_and_the_exit_code_says_so(nobody, capsys):
    assert states("ports out", coordinator=nobody) == ["bad"]
    assert run(["doctor", "--coordinator", nobody]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "ports out" in line]
    assert line.startswith("bad")
    assert "try: start the coordinator" in line


def test_what_listens_but_is_no_coordinator_is_bad(monkeypatch):
    monkeypatch.setattr("ferrorpc.cli.client.CALL_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        told = {one.topic: one.state for one in run_checks(Config({"coordinator": address}, {}), {})}
    assert (told["ports out"], told["ports"]) == ("ok", "bad")


def test_a_misspelt_variable_is_noted_with_what_may_be_meant():
    """Its default counts; where what is meant is not clear, this is the only place that says so."""
    known = {"FERRORPC_TIMEOUT": "5", "PATH": "/bin"}
    (one,) = found("settings", {"FERRORPC_TIMOUT": "5", **known})
    assert (one.state, "FERRORPC_TIMOUT" in one.text, "FERRORPC_TIMEOUT" in one.fix) == ("note", True, True)
    assert [one.state for one in found("settings", known)] == ["ok"]


def test_a_bad_value_is_one_finding_among_the_others(monkeypatch, capsys):
    monkeypatch.setenv("FERRORPC_LEASE", "soon")
    assert run(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("bad")]
    assert "FERRORPC_LEASE='soon'" in line
    assert "try: correct or unset FERRORPC_LEASE" in line
    assert any("shared memory" in line for line in lines)


@pytest.mark.parametrize("name", ["a" * 64, "h\udcf4te"])
def test_a_host_name_that_no_name_server_could_know(name, monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: name)
    (one,) = found("names")
    assert one.state == "note"
    assert "this host's own name, " in one.text
    assert "cannot be resolved: " in one.text


def test_names_that_lead_nowhere():
    (one,) = [one for one in found("names", coordinator="coordinator.invalid:29700") if "coordinator.invalid" in one.text]
    assert one.state == "bad"


def test_proxies_are_named_but_do_no_harm():
    (one,) = found("proxies", {"HTTP_PROXY": "http://user:word@proxy:3128", "no_proxy": "x"})
    assert one.state == "note"
    assert "HTTP_PROXY" in one.text
    assert "word" not in str(one)


def test_a_worker_that_would_listen_in_the_clear_is_bad():
    assert states("ports", bind="0.0.0.0") == ["bad"]
    assert states("ports in", bind="0.0.0.0", insecure=True) == ["ok"]
    assert states("ports in", advertise="127.0.0.1") == ["ok"]


@pytest.mark.parametrize(("bind", "advertise"), [("::", "127.0.0.1"), ("0.0.0.0", "::1")])
def test_a_worker_that_listens_everywhere_is_reached_by_both_families(bind, advertise):
    assert states("ports in", bind=bind, advertise=advertise, insecure=True) == ["ok"]


def test_ports_that_are_used_up_are_no_wrong_setting(monkeypatch, nobody):
    def create_server(*_, **__):
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    monkeypatch.setattr(socket, "create_server", create_server)
    (one,) = found("ports in", coordinator=nobody)
    assert (one.state, one.text) == ("bad", "127.0.0.1: every port is in use")
    assert "FERRORPC_BIND" not in one.fix


def test_without_a_coordinator_a_loopback_that_is_down_is_what_is_told(monkeypatch):
    monkeypatch.setattr("ferrorpc.cli.ports.LOOPBACK", "192.0.2.1")  # of the documentation's network: nobody has it
    (one,) = found("ports")
    assert one.state == "bad"
    assert "192.0.2.1" in one.text
    assert "bring the loopback interface up" in one.fix


@pytest.mark.parametrize(("reason", "state"), [("", "ok"), ("shared memory needs Linux", "note")])
def test_shared_memory_is_as_the_lane_sees_it(monkeypatch, reason, state):
    monkeypatch.setattr("ferrorpc.transports.shared_memory.host_identity.unsupported_reason", lambda: reason)
    (one,) = found("shared memory")
    assert one.state == state
    assert reason in one.text


def test_a_backend_that_only_the_script_may_know_is_noted():
    (one,) = found("backend", backend="mpi")
    assert one.state == "note"
    assert "'mpi' is not one of auto, grpc" in one.text
    assert states("backend") == ["ok"]


def test_certificates_are_looked_at(tmp_path):
    pytest.importorskip("cryptography")
    from tests.certificates import Issuer, settings

    given = settings(Issuer(tmp_path / "ours").issue(Role.WORKER, "a"))
    assert states("TLS") == ["note"]
    (one,) = found("TLS", job="a", **given)
    assert (one.state, "worker of job a" in one.text) == ("ok", True)
    assert states("TLS", job="b", **given) == ["bad"]
    (tmp_path / "ours" / "worker-a" / "worker.key").chmod(0o644)
    assert states("TLS", job="a", **given) == ["ok", "bad"]
    assert states("TLS", job="a", **(given | {"tls_ca": str(tmp_path / "none")})) == ["bad"]


@pytest.mark.parametrize("lines", [f"observer {'1a' * 32}", f"# who\nworker@a {'1a' * 32}\nadmin {'2b' * 32}\n"])
def test_a_coordinators_list_of_tokens_is_no_fault_and_hides_none_of_its_certificate(tmp_path, lines):
    pytest.importorskip("cryptography")
    from tests.certificates import Issuer, settings

    issuer, tokens = Issuer(tmp_path / "ours"), tmp_path / "tokens"
    tokens.write_text(lines)
    given = settings(issuer.issue(Role.COORDINATOR, "a")) | {"token_file": str(tokens), "job": "a"}
    (one,) = found("token", **given)
    assert (one.state, f"{tokens} is a list of tokens" in one.text) == ("note", True)
    assert states("token", **given, coordinator="127.0.0.1:1") == ["bad"], "a member, which brings one"
    assert "1a1a" not in str(one)
    assert states("TLS", **given) == ["ok"]
    (expired,) = found(
        "TLS", **(given | settings(issuer.issue(Role.COORDINATOR, "a", lifetime=datetime.timedelta(minutes=-1))))
    )
    assert (expired.state, "certificate has expired" in expired.text) == ("bad", True)
    assert states("token", token_file=str(tmp_path / "none")) == ["bad"]


def test_a_coordinator_whose_clients_bring_tokens_has_a_certificate_and_no_authority(tmp_path):
    pytest.importorskip("cryptography")
    from tests.certificates import Issuer, settings

    given = settings(Issuer(tmp_path / "ours").issue(Role.COORDINATOR, "a"))
    (one,) = found("TLS", **(given | {"tls_ca": None}))
    assert (one.state, "a certificate without an authority" in one.text) == ("note", True)
    Path(given["tls_key"]).chmod(0o644)
    assert states("TLS", **(given | {"tls_ca": None})) == ["note", "bad"]


@pytest.mark.parametrize(
    ("topic", "settings", "said"),
    [
        ("algorithm", {"algorithm": "foo=ring"}, "there is no operation 'foo'"),
        ("algorithm", {"algorithm": "all_reduce=zzz"}, "all_reduce has no algorithm 'zzz'"),
        ("cost table", {"cost_table": "/nowhere"}, "No such file"),
        ("cost table", {"cost_table": __file__}, "not JSON"),
        ("trace", {"trace_dir": "/proc/nowhere"}, "No such file"),
        ("trace", {"trace_dir": __file__}, "Not a directory"),
    ],
)
def test_settings_that_name_what_is_not_there_are_bad(topic, settings, said):
    """Every job would end with 64."""
    (one,) = found(topic, **settings)
    assert (one.state, said in one.text) == ("bad", True)


def test_a_directory_of_traces_whose_mount_is_missing_is_bad(tmp_path):
    (tmp_path / "traces").symlink_to(tmp_path / "nowhere")
    assert states("trace", trace_dir=str(tmp_path / "traces")) == ["bad"]


def test_settings_that_name_what_is_there_are_ok_and_nothing_is_made_to_see_that(tmp_path):
    table = tmp_path / "costs.json"
    table.write_text(packaged_table().text())
    given = {"algorithm": "all_reduce=ring", "cost_table": str(table), "trace_dir": str(tmp_path / "a" / "b")}
    assert [states(topic, **given) for topic in ("algorithm", "cost table", "trace")] == [["ok"]] * 3
    assert list(tmp_path.iterdir()) == [table]
    assert [states(topic) for topic in ("algorithm", "cost table", "trace")] == [[]] * 3


def test_opentelemetry_is_looked_for_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    assert states("OpenTelemetry") == []
    (one,) = found("OpenTelemetry", otel=True)
    assert (one.state, "ferrorpc[otel]" in one.fix) == ("bad", True)


def test_the_cost_table_of_a_coordinator_that_is_named_may_be_on_its_host_only(nobody):
    assert states("cost table", cost_table="/nowhere", coordinator=nobody) == []


@pytest.mark.parametrize(
    ("backend", "packages", "expected"),
    [
        ("grpc", (), [("GPU", "note"), ("NCCL", "note")]),
        ("hybrid", (), [("GPU", "bad"), ("NCCL", "bad")]),
        ("cuda_ipc", (), [("GPU", "bad"), ("NCCL", "note")]),
        ("cuda_ipc", ("cupy",), [("GPU", "ok"), ("NCCL", "note")]),
        ("nccl", ("cupy", "torch", "nvidia/nccl"), [("GPU", "ok"), ("NCCL", "ok")]),
        ("nccl", ("torch",), [("GPU", "bad"), ("NCCL", "bad")]),
    ],
)
def test_on_a_host_with_gpus_it_looks_for_what_sees_them(monkeypatch, tmp_path, backend, packages, expected):
    """torch alone does not: ferrorpc sees its tensors there through CuPy."""
    for package in packages:
        (tmp_path / package).mkdir(parents=True)
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(doctor.sys, "path", [str(tmp_path)])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(doctor, "Path", lambda place: tmp_path if place == "/dev" else Path(place))
    told = list(doctor.gpu(Config({"backend": backend}, {}), {}))
    assert [(one.topic, one.state) for one in told] == expected
    assert all("ferrorpc[gpu]" in one.fix for one in told if one.state != "ok")
