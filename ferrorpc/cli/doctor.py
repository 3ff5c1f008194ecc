"""`ferrorpc doctor`: looks for what would keep a job from working on this machine; prints a line and a fix for each finding.

It changes nothing, and sends only what a member would send: it resolves names, opens and dials a port, and asks the
coordinator for its health.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click

from ferrorpc.cli.client import call, channel, connect, token
from ferrorpc.cli.parameters import job_option
from ferrorpc.cli.ports import LOOPBACK, free_port
from ferrorpc.config import SETTINGS, Config, split_invalid, unknown_settings
from ferrorpc.errors import ConfigError, FerroError
from ferrorpc.logs import escape_unprintable
from ferrorpc.versions import own_version, version_of
from ferrorpc.wire import options as wire_options
from ferrorpc.wire.address import cannot_listen, listen, split_address

DIAL_SECONDS: Final = 2.0
SLOW_LOOKUP_SECONDS: Final = 1.0
_TIME_ERROR: Final = 5
"""What adjtimex returns while the clock is not synchronised."""
_TIMEX_BYTES: Final = 1024
"""More than the size of struct timex on any platform."""
_PROXIES: Final = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `state` is "ok", "note" (good to know) or "bad" (a job would fail); `fix` what to do about it."""

    state: str
    topic: str
    text: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.state:4}  {self.topic:13}  {self.text}{f'; try: {self.fix}' if self.fix else ''}"


Findings = Iterator[Finding]
Check = Callable[[Config, Mapping[str, str]], Findings]


@click.command("doctor")
@click.option("--coordinator", "--addr", "address", metavar="HOST:PORT", help="Default: FERRORPC_COORDINATOR.")
@job_option
def command(address: str | None, job: str | None) -> int:
    """Check for what would keep a job from working here. Exit code 1 where something would."""
    config = Config({"coordinator": address, "job": job}, split_invalid(os.environ)[0])
    findings = run_checks(config, os.environ)
    for finding in findings:
        click.echo(str(finding))
    return int(any(finding.state == "bad" for finding in findings))


def run_checks(config: Config, environment: Mapping[str, str]) -> list[Finding]:
    """All findings; a check that raises an error is a finding itself."""
    found: list[Finding] = []
    for topic, check in CHECKS.items():
        try:
            found += check(config, environment)
        except FerroError as error:
            found.append(Finding("bad", topic, error.message, error.hint))
    return found


def versions(config: Config, environment: Mapping[str, str]) -> Findings:
    """Versions of ferrorpc and of what it depends on."""
    found = {"python": platform.python_version(), "ferrorpc": own_version()}
    for package in ("grpcio", "protobuf", "numpy"):
        if number := version_of(package):
            found[package] = number
        else:
            yield Finding("bad", "versions", f"{package} is not installed as a package", f"pip install {package}")
    yield Finding("ok", "versions", ", ".join(f"{name} {number}" for name, number in found.items()))
    if "grpcio" in found and not wire_options.bounds_floods(found["grpcio"]):
        since = ".".join(map(str, wire_options.FLOODS_BOUNDED_SINCE))
        what = "servers of this grpcio can be made to fill the memory with pings by anyone who reaches their ports"
        yield Finding("note", "versions", what, f"pip install 'grpcio>={since}'")


def settings(config: Config, environment: Mapping[str, str]) -> Findings:
    """Variables with invalid values, and variables that look like settings but are not."""
    _, wrong = split_invalid(environment)
    for variable, error in wrong.items():
        yield Finding("bad", "settings", error.message, f"correct or unset {variable}; the checks below use its default")
    unknown = unknown_settings(environment)
    for name, meant in unknown:
        fix = meant or "`ferrorpc config`, which lists all settings"
        yield Finding("note", "settings", f"{name} is set, but there is no such setting", fix)
    if not unknown and not wrong:
        changed = sum(config.source(setting.name) != "default" for setting in SETTINGS)
        yield Finding("ok", "settings", f"{changed} of {len(SETTINGS)} are set, and no variable is misspelt")


def names(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether the host names that a member needs can be resolved."""
    wanted = {socket.gethostname(): "this host's own name"}
    if config["coordinator"]:
        wanted[split_address(config["coordinator"])[0]] = "the coordinator's host"
    for host, what in wanted.items():
        began = time.monotonic()
        try:
            address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
        except (OSError, UnicodeError) as error:
            own = what.startswith("this")
            fix = "an entry in /etc/hosts, or FERRORPC_ADVERTISE" if own else "check FERRORPC_COORDINATOR and the name server"
            why = error.strerror if isinstance(error, OSError) else "it is not the name of a host"
            shown = escape_unprintable(host)
            yield Finding("note" if own else "bad", "names", f"{what}, {shown}, cannot be resolved: {why}", fix)
            continue
        seconds = time.monotonic() - began
        slow = seconds > SLOW_LOOKUP_SECONDS
        took = f" after {seconds:.1f} s" if slow else ""
        fix = "look at the name servers in /etc/resolv.conf" if slow else ""
        yield Finding("note" if slow else "ok", "names", f"{what}, {host}, is {address}{took}", fix)


def proxies(config: Config, environment: Mapping[str, str]) -> Findings:
    """Proxy variables, which ferrorpc ignores."""
    named = [name for name in environment if name.lower() in _PROXIES and environment[name]]
    if named:
        yield Finding("note", "proxies", f"{', '.join(sorted(named))} set; ferrorpc ignores proxies and dials directly")
    else:
        yield Finding("ok", "proxies", "none set")


def ports(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether peers could reach a worker here: opens a port where workers listen and dials it at its advertised address."""
    from ferrorpc.bootstrap.address import advertised_host, require_authentication
    from ferrorpc.wire.tls import TlsFiles

    require_authentication(config, TlsFiles.of(config))
    bind = str(config["bind"])
    address = config["coordinator"] or f"{LOOPBACK}:{free_port()}"  # as that of the coordinator of `ferrorpc run`
    yield _ports_in(bind, advertised_host(address, {**config, "timeout": DIAL_SECONDS}))
    if not config["coordinator"]:
        yield Finding("note", "ports out", "no coordinator is named", "give --coordinator or FERRORPC_COORDINATOR to check one")
        return
    target, number = split_address(config["coordinator"])
    try:
        socket.create_connection((target, number), DIAL_SECONDS).close()
    except OSError as error:
        yield Finding(
            "bad", "ports out", f"{target} port {number} cannot be dialled: {error}", "start the coordinator; check firewalls"
        )
    else:
        yield Finding("ok", "ports out", f"{target} port {number} can be dialled")
        yield from _coordinator(config)


def _ports_in(bind: str, host: str) -> Finding:
    try:
        listening = listen(bind, 0)
    except OSError as error:
        told = cannot_listen(bind, error)
        return Finding("bad", "ports in", told.message, told.hint)
    with listening:
        try:
            socket.create_connection((host, listening.getsockname()[1]), DIAL_SECONDS).close()
        except OSError as error:
            what = f"a worker on {bind} cannot be reached as {host}: {error}"
            return Finding("bad", "ports in", what, "set FERRORPC_BIND or FERRORPC_ADVERTISE")
    return Finding("ok", "ports in", f"a worker on {bind} can be reached as {host} from here; workers use any free port")


def _coordinator(config: Config) -> Findings:
    """Whether a healthy coordinator listens there and accepts this process."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with channel(config) as opened:
        request = health_pb2.HealthCheckRequest(service="ferrorpc.v1.CoordinatorService")
        answer = call(health_pb2_grpc.HealthStub(opened).Check, request, config)
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    fix = "" if serving else "wait until it has started, or read its log"
    does = "serves" if serving else "is stopping"
    yield Finding("ok" if serving else "bad", "coordinator", f"{config['coordinator']} {does}", fix)
    yield from _same_version(config)


def _same_version(config: Config) -> Findings:
    from ferrorpc.v1.session_pb2 import StatusRequest

    with connect(config) as stub:
        try:
            theirs = call(stub.Status, StatusRequest(job=config["job"], token=token(config)), config).version
        except ConfigError:
            yield Finding("ok", "job", f"job {config['job']} does not exist there yet")
            return
    mine = own_version()
    if theirs != mine:
        yield Finding("note", "versions", f"the coordinator is {theirs}, this is {mine}", "install the same version everywhere")


def clock(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether the clock is synchronised, which certificates depend on. ferrorpc itself never compares clocks."""
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        state = -1
    if state == _TIME_ERROR:
        yield Finding(
            "note", "clock", "the clock is not synchronised (this matters only for TLS)", "run chrony or ntpd on the host"
        )
    elif state < 0:
        yield Finding("note", "clock", "cannot tell whether the clock is synchronised")
    else:
        yield Finding("ok", "clock", "synchronised by the host")


def shared_memory(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether ranks on this host can share memory."""
    from ferrorpc.transports.shared_memory.host_identity import unsupported_reason

    reason = unsupported_reason()
    if reason:
        yield Finding("note", "shared memory", f"{reason}; ranks on this host use gRPC")
    else:
        yield Finding("ok", "shared memory", "ranks of this user on this host share memory")


def backend(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether the chosen backend is one of ferrorpc's own."""
    from ferrorpc.backends import registry

    chosen, known = config["backend"], registry.names()
    if chosen in known:
        yield Finding("ok", "backend", chosen)
    else:
        fix = "correct FERRORPC_BACKEND, unless the script registers it"
        yield Finding("note", "backend", f"{chosen!r} is not one of {', '.join(known)}", fix)


def algorithm(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether the operations and algorithms that are asked for exist."""
    from ferrorpc.collectives.tuning import parse_algorithms

    asked = parse_algorithms(config["algorithm"] or (), config.source("algorithm"))
    if asked:
        yield Finding("ok", "algorithm", ", ".join(f"{operation.value} by {name}" for operation, name in asked))


def cost_table(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether a coordinator that a job starts here can publish the cost table. One that is named has its own."""
    from ferrorpc.wire.cost_table import read

    path = config["cost_table"]
    if path is not None and config["coordinator"] is None:
        yield Finding("ok", "cost table", f"{read(path).name}, of {path}")


def trace(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether a trace could be written: a nameless file is, to its directory or to the one in which that would be made."""
    directory = config["trace_dir"]
    if directory is None:
        return
    try:
        present = next(each for each in (Path(directory), *Path(directory).parents) if os.path.lexists(each))
        tempfile.TemporaryFile(dir=present).close()
    except OSError as error:
        yield Finding("bad", "trace", f"FERRORPC_TRACE_DIR={directory}: {error.strerror}", "name a directory to write to")
    else:
        yield Finding("ok", "trace", f"can be written to {directory}")


def opentelemetry(config: Config, environment: Mapping[str, str]) -> Findings:
    """Whether OpenTelemetry's API is installed, where it is asked for."""
    from ferrorpc.telemetry import OpenTelemetryObserver

    if config["otel"]:
        OpenTelemetryObserver()
        yield Finding("ok", "OpenTelemetry", "its API is installed")


_GPU_PACKAGES: Final = "pip install 'ferrorpc[gpu]'"


def gpu(config: Config, environment: Mapping[str, str]) -> Findings:
    """GPUs, and the packages that use them."""
    backend = config["backend"]
    needed, by_nccl = backend in ("nccl", "hybrid", "cuda_ipc"), backend in ("nccl", "hybrid")
    devices = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        fix = "start the container with GPUs, or choose FERRORPC_BACKEND=grpc" if needed else ""
        yield Finding("bad" if needed else "ok", "GPU", "no NVIDIA device is visible", fix)
        return
    if importlib.util.find_spec("cupy") is not None:
        yield Finding("ok", "GPU", ", ".join(devices))
    else:
        what = f"{', '.join(devices)}, but CuPy is missing, which arrays and torch's tensors on GPUs need"
        yield Finding("bad" if needed else "note", "GPU", what, _GPU_PACKAGES)
    if any((Path(place) / "nvidia" / "nccl").is_dir() for place in sys.path):
        yield Finding("ok", "NCCL", "installed as a package")
    else:
        yield Finding("bad" if by_nccl else "note", "NCCL", "not installed", _GPU_PACKAGES)


def bearer_token(config: Config, environment: Mapping[str, str]) -> Findings:
    """The token that this process brings, or the list of those that a coordinator accepts."""
    from ferrorpc.wire.token import is_list, read_token

    path = config["token_file"]
    if path is not None and is_list(path):
        what = f"{path} is a list of tokens, right for a coordinator only"
        state = "note" if config["coordinator"] is None else "bad"  # who names one is a client
        yield Finding(state, "token", what, "give any other process a file with the one token that it brings")
    elif read_token(path):
        yield Finding("ok", "token", "this process has one")


def tls(config: Config, environment: Mapping[str, str]) -> Findings:
    """The certificates, checked as the other end will check them."""
    from ferrorpc.wire.identity import compared, described
    from ferrorpc.wire.tls import TlsFiles

    files = TlsFiles.of(config)
    if files is None:
        yield Finding("note", "TLS", "off, which is fine on loopback", "`ferrorpc certs init` for other networks")
        return
    found = files.check(listening=False)
    if files.certificate is None:
        yield Finding("ok", "TLS", "the coordinator is checked by its host name; this process has no certificate")
        return
    if files.authority is None:
        what = "a certificate without an authority to check others by, right only for a coordinator whose clients bring tokens"
        yield Finding("note", "TLS", what, "set FERRORPC_TLS_CA for any other process")
    else:
        mine = [one for one in found if one.covers(config["job"])]
        fix = "" if mine else f"`ferrorpc certs issue` with --job {shlex.quote(config['job'])}, or set FERRORPC_JOB"
        other = "" if mine else f", not of {compared(config['job'])}"
        yield Finding("ok" if mine else "bad", "TLS", f"the certificate is that of {described(found)}{other}", fix)
    assert files.key is not None
    if os.stat(files.key).st_mode & 0o007:
        yield Finding("bad", "TLS", f"everybody on this host may read the key {files.key}", f"chmod o= {files.key}")


CHECKS: Final[dict[str, Check]] = {
    "versions": versions,
    "settings": settings,
    "names": names,
    "proxies": proxies,
    "token": bearer_token,
    "TLS": tls,
    "ports": ports,
    "clock": clock,
    "shared memory": shared_memory,
    "backend": backend,
    "algorithm": algorithm,
    "cost table": cost_table,
    "trace": trace,
    "OpenTelemetry": opentelemetry,
    "GPU": gpu,
}
"""Topic -> its check, in the order in which they are shown."""
