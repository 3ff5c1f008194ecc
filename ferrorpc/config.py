"""All settings, in one table, from which environment variables, the coordinator's flags and `ferrorpc config` are derived.

Precedence: argument > variable > default. Seconds are floats ("60", "500ms"), sizes have units ("4MiB"), paths become absolute.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

from ferrorpc.errors import ConfigError

DEFAULT_PORT: Final = 29700
LANES_MAX: Final = 16
"""Most data streams from one rank to another."""
PREFIX: Final = "FERRORPC_"
LAUNCH_VARIABLE: Final = PREFIX + "LAUNCH"
"""Not a setting: RUN/START, an id of the launcher's run and one of each start of a process, to tell its exit from that of a
later start."""
GIVEN_VARIABLE: Final = PREFIX + "GIVEN"
"""Not a setting: NAME=VALUE for each setting of its job that a launcher gave the process, which may set others of its own."""
_NO_SETTINGS: Final = (LAUNCH_VARIABLE, GIVEN_VARIABLE)
_SECONDS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0}
_SECONDS_MAX: Final = 1e9
"""About 30 years, which fit into 64 bits as nanoseconds."""
_INTERVAL_MIN: Final = 0.01
_NUMBER_MAX: Final = (1 << 31) - 1
"""Ranks and sizes of worlds are sent as 32-bit integers."""
_BYTES: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "kB": 1000, "MB": 10**6, "GB": 10**9}
NAME_BYTES_MAX: Final = 128
VALID_NAME: Final = re.compile(r"[!-.0-~]+")
"""Of a job or of a member; a coordinator refuses others."""
_SIMILARITY_MIN: Final = 0.85
"""Names as similar as this are taken for misspelt settings. Less would match <SERVICE>_PORT, which Kubernetes sets."""
_TRUE: Final = ("1", "true", "yes", "on")
_FALSE: Final = ("0", "false", "no", "off", "")
_NUMBER: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def seconds(text: str) -> float:
    """A duration: "60", "0.5", "500ms", "2min"."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in _SECONDS:
        raise ValueError("expected seconds, such as 60, 0.5 or 500ms")
    duration = float(match[1]) * _SECONDS[match[2]]
    if duration > _SECONDS_MAX:
        raise ValueError(f"expected at most {_SECONDS_MAX:.0f} seconds")
    return duration


def interval(text: str) -> float:
    """A duration between repetitions, of at least 10 ms."""
    if seconds(text) < _INTERVAL_MIN:
        raise ValueError(f"expected at least {_INTERVAL_MIN * 1000:.0f}ms")
    return seconds(text)


def size_bytes(text: str) -> int:
    """A size: "4MiB", "512KiB", "1048576"."""
    match = _NUMBER.fullmatch(text)
    if match is None or match[2] not in _BYTES or not (size := float(match[1]) * _BYTES[match[2]]) < 1 << 63:
        raise ValueError("expected a size, such as 4MiB or 512KiB")
    return int(size)


def plain_name(text: str) -> str:
    """A valid name of a job or of a member."""
    if len(text) > NAME_BYTES_MAX or not VALID_NAME.fullmatch(text):
        raise ValueError(f"expected at most {NAME_BYTES_MAX} characters of printable ASCII, without blanks and slashes")
    if text in (".", ".."):
        raise ValueError("expected a name that can be that of a directory")
    return text


def path(text: str) -> str:
    """A file's or a directory's path, made absolute: files are read again later, and a script may change its directory.

    An empty one, as of a variable that is not set, would mean the working directory. Where that is gone, a relative one stays.
    """
    if not text or "\0" in text:
        raise ValueError("expected a path")
    try:
        return str(Path(text).absolute())
    except FileNotFoundError:
        return text


def token_path(text: str) -> str:
    """As `path`, but what leads nowhere stays as it is: it may be a token, given by mistake, which no message must show."""
    absolute = path(text)
    return absolute if os.path.exists(absolute) else text


def host_name() -> str:
    """This machine's name, with a dash for each character that no name may have: members are named after their hosts."""
    return "".join(letter if VALID_NAME.fullmatch(letter) else "-" for letter in socket.gethostname())


def whole_number(text: str) -> int:
    """ "0", "17"."""
    if not (text.isascii() and text.isdigit()) or int(text) > _NUMBER_MAX:
        raise ValueError(f"expected a whole number, at most {_NUMBER_MAX}")
    return int(text)


def lanes(text: str) -> int:
    """A number of connections to each peer, "1" to "16"."""
    if not 1 <= whole_number(text) <= LANES_MAX:
        raise ValueError(f"expected a number from 1 to {LANES_MAX}")
    return int(text)


def port(text: str) -> int:
    """A port, "0" to "65535"."""
    if text.startswith("tcp://"):
        raise ValueError(
            "expected a port; Kubernetes sets this for a Service that is called ferrorpc, unless the pod's spec says "
            "enableServiceLinks: false"
        )
    if whole_number(text) > 65535:
        raise ValueError("expected a port, at most 65535")
    return int(text)


def host_port(text: str) -> str:
    """ "host:port", the port without leading zeros; an IPv6 host in brackets."""
    host, _, number = text.rpartition(":")
    if not host or not number.isdecimal() or int(number) > 65535 or (":" in host and not host.startswith("[")):
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:29700, an IPv6 host in brackets")
    try:
        host.encode("idna")  # as whoever resolves it does
    except UnicodeError:
        raise ValueError("a part of the host's name is empty or longer than 63 characters") from None
    return f"{host}:{int(number)}"


def plain_host(text: str) -> str:
    """A host's name or address; an IPv6 address with or without brackets."""
    if text.count(":") == 1 or "]:" in text or "/" in text or text.split() != [text]:
        raise ValueError("expected a host name or an address, without a port")
    return text


def world_size(text: str) -> tuple[int, int]:
    """ "N" or "MIN:MAX", as (min, max)."""
    low, _, high = text.partition(":")
    if not low.isdecimal() or (high and not high.isdecimal()):
        raise ValueError("expected N or MIN:MAX")
    result = int(low), int(high or low)
    if not 1 <= result[0] <= result[1] <= _NUMBER_MAX:
        raise ValueError(f"expected 1 <= MIN <= MAX <= {_NUMBER_MAX}")
    return result


def boolean(text: str) -> bool:
    """1/0, true/false, yes/no, on/off."""
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError("expected 1 or 0")
    return text.lower() in _TRUE


def choices_by_operation(text: str) -> tuple[tuple[str, str], ...]:
    """ "all_reduce=ring,broadcast=tree", as ((operation, algorithm), ...)."""
    pairs = [tuple(part.strip() for part in each.partition("=")[::2]) for each in text.split(",")]
    if not all(operation and name for operation, name in pairs):
        raise ValueError("expected OPERATION=ALGORITHM, separated by commas, such as all_reduce=ring,broadcast=tree")
    if len({operation for operation, _ in pairs}) < len(pairs):
        raise ValueError("an operation is named twice")
    return tuple((operation, name) for operation, name in pairs)


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    name: str
    default: Any
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """Its environment variable."""
        return PREFIX + self.name.upper()


SETTINGS: Final = (
    Setting(
        "coordinator",
        None,
        host_port,
        "host:port of the coordinator; without one a local coordinator or a world of one",
    ),
    Setting("job", "default", plain_name, "name of the job; jobs on one coordinator do not see each other"),
    Setting("name", None, plain_name, "this member's name; default <node>-<local rank>, the pod's, or <host>-<pid>"),
    Setting("world_size", None, world_size, "N members, or MIN:MAX for an elastic world; `ferrorpc run --world-size` sets it"),
    Setting("rank_hint", None, whole_number, "the rank to give this member where it is free"),
    Setting("backend", "auto", str, "who performs operations: auto, grpc, simulated, nccl, hybrid, cuda_ipc or one registered"),
    Setting("transport", "auto", str, "how tensors travel between ranks", ("auto", "grpc", "shared_memory")),
    Setting("device", None, whole_number, "number of this rank's GPU; default torch's, or its own among its node's processes"),
    Setting("lanes", 1, lanes, "gRPC connections to each peer that the chunks of large messages are dealt out to, 1 to 16"),
    Setting("bind", "127.0.0.1", plain_host, "address this worker listens on"),
    Setting(
        "advertise",
        None,
        plain_host,
        "host the other ranks reach this worker by; default the address of the route to the coordinator",
    ),
    Setting("port", DEFAULT_PORT, port, "port of a coordinator that rank 0 starts"),
    Setting("listen", f"127.0.0.1:{DEFAULT_PORT}", host_port, "host:port a coordinator listens on; port 0 takes a free one"),
    Setting("data_dir", None, path, "directory of a coordinator's journal; without one a restart forgets everything"),
    Setting("http_port", None, port, "port of a coordinator's status page, /metrics and /healthz; none without it"),
    Setting(
        "cost_table",
        None,
        path,
        "file from `ferrorpc bench --fit`, which a coordinator publishes to its jobs; none for the packaged cost table",
    ),
    Setting(
        "algorithm",
        None,
        choices_by_operation,
        "algorithms by operation, as all_reduce=ring,broadcast=tree, for calls that name none; the same on every rank",
    ),
    Setting("timeout", 60.0, seconds, "seconds for a rendezvous and for each operation"),
    Setting("heartbeat_interval", 0.5, interval, "seconds between beats, at most a quarter of the lease"),
    Setting(
        "lease",
        3.0,
        seconds,
        "seconds without a frame after which a member is stalled, or dead once its stream has ended",
    ),
    Setting("grace", 2.0, seconds, "seconds a member whose stream ended has to resume"),
    Setting("stall", 60.0, seconds, "seconds after which a stalled member is evicted"),
    Setting("max_outage", 300.0, seconds, "seconds without a coordinator before that is an error"),
    Setting("tls_ca", None, path, "file with the job's certificate authority; every process needs a certificate of it"),
    Setting("tls_cert", None, path, "file with this process's certificate"),
    Setting("tls_key", None, path, "file with this process's key"),
    Setting(
        "token_file",
        None,
        token_path,
        "file with the job's bearer token; a coordinator's may have a line for each token that clients may bring",
    ),
    Setting("insecure", False, boolean, "listen beyond loopback, and send a token there, without TLS"),
    Setting("log_level", "WARNING", str, "of the loggers ferrorpc.*", ("DEBUG", "INFO", "WARNING", "ERROR")),
    Setting("log_format", "text", str, "how log lines look", ("text", "json")),
    Setting(
        "trace_dir", None, path, "directory to write a trace of each process's operations to, for Perfetto and chrome://tracing"
    ),
    Setting("otel", False, boolean, "spans and durations of operations through OpenTelemetry's API"),
)
_BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
_Seconds: TypeAlias = float | str | timedelta | None
_Path: TypeAlias = str | os.PathLike[str] | None


class SettingArguments(TypedDict, total=False):
    """The types of SETTINGS as arguments, but for the three that `init_process_group` names. None counts as not given."""

    coordinator: str | None
    job: str | None
    name: str | None
    world_size: int | str | tuple[int, int] | None
    rank_hint: int | None
    device: int | None
    lanes: int | None
    bind: str | None
    advertise: str | None
    port: int | None
    listen: str | None
    data_dir: _Path
    http_port: int | None
    cost_table: _Path
    algorithm: str | None
    heartbeat_interval: _Seconds
    lease: _Seconds
    grace: _Seconds
    stall: _Seconds
    max_outage: _Seconds
    tls_ca: _Path
    tls_cert: _Path
    tls_key: _Path
    token_file: _Path
    insecure: bool | None
    log_level: str | None
    log_format: str | None
    trace_dir: _Path
    otel: bool | None


_SET_BY_LAUNCHER: Final = "leave it out: `ferrorpc run`, torchrun, SLURM and mpirun set it by variables"
_USE_COORDINATOR: Final = 'leave it out under a launcher, else pass coordinator="host:port"'
_TORCH_ARGUMENTS: Final = {
    "init_method": _USE_COORDINATOR,
    "master_addr": _USE_COORDINATOR,
    "master_port": _USE_COORDINATOR,
    "rank": f"{_SET_BY_LAUNCHER}, such as RANK; rank_hint= asks for a rank where it is free",
    "local_rank": _SET_BY_LAUNCHER,
    "size": "world_size=, which is a setting; a launcher sets it by a variable",
    "store": "leave it out: the group comes with one, group.store",
    "group_name": 'job="name" keeps jobs on one coordinator apart',
    "pg_options": "leave it out",
    "device_id": "device=, the number of this rank's GPU",
}
"""Arguments of torch's init_process_group, and what to use here instead."""


def unknown_settings(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables with the prefix of settings that are none, each with the setting that is likely meant, or ""."""
    known = {setting.variable.removeprefix(PREFIX): setting.variable for setting in SETTINGS}
    given = sorted(name.removeprefix(PREFIX) for name in environment if name.startswith(PREFIX) and name not in _NO_SETTINGS)
    return [(PREFIX + name, known.get(_likely(name, known), "")) for name in given if name not in known]


def _likely(name: str, known: Iterable[str]) -> str:
    """Which of the known names one that is not among them is likely meant for: WORLD, TIMEOUT_SECONDS, TIMOUT; "" for none."""
    without_unit = re.sub(r"(?i)_(s|seconds?)$", "", name)
    longer = [each for each in known if each.startswith(f"{name}_")]
    if without_unit in known:
        return without_unit
    return longer[0] if len(longer) == 1 else next(iter(difflib.get_close_matches(name, known, 1, _SIMILARITY_MIN)), "")


@dataclass(frozen=True, slots=True)
class Value:
    """A setting's value, where it came from ("argument", the variable's name, or "default"), and the text it was read from."""

    value: Any
    source: str
    text: str = ""


class Config(Mapping[str, Any]):
    """The settings of one process, read once: `config["lease"]`, `config.source("lease")`."""

    def __init__(self, arguments: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None) -> None:
        environment = os.environ if environment is None else environment
        given = {name: value for name, value in (arguments or {}).items() if value is not None}
        unknown = sorted(set(given) - set(_BY_NAME))
        if unknown:
            raise ConfigError(f"no setting is called {', '.join(unknown)}", hint=_suggestion_for(unknown[0]))
        self._values = {setting.name: _resolve(setting, given, environment) for setting in SETTINGS}

    def __getitem__(self, name: str) -> Any:
        return self._values[name].value

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def source(self, name: str) -> str:
        """Where the value came from: "argument", the variable's name, or "default"."""
        return self._values[name].source

    def given(self) -> dict[str, str]:
        """Variable -> text of the settings that were given as arguments, to pass them on to another process."""
        return {setting.variable: v.text for setting in SETTINGS if (v := self._values[setting.name]).source == "argument"}

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={v.value!r}" for name, v in self._values.items() if v.source != "default")
        return f"Config({shown})"


def split_invalid(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, ConfigError]]:
    """The environment without the variables whose values are invalid; and those variables, each with its error.

    For diagnostic commands, which report every one instead of failing at the first.
    """
    errors: dict[str, ConfigError] = {}
    for variable in (setting.variable for setting in SETTINGS):
        try:
            Config(environment={variable: environment.get(variable, "")})
        except ConfigError as error:
            errors[variable] = error
    return {name: value for name, value in environment.items() if name not in errors}, errors


def _suggestion_for(name: str) -> str:
    """What to try instead of an argument that is no setting."""
    if name in _TORCH_ARGUMENTS:
        return _TORCH_ARGUMENTS[name]
    near = _likely(name, _BY_NAME)
    return f"{near}=, which is a setting" if near else f"settings are: {', '.join(_BY_NAME)}"


def _as_text(raw: Any) -> str:
    """An argument as the text of its variable, so that both are checked alike: (2, 4) as "2:4"."""
    if isinstance(raw, timedelta):
        return str(raw.total_seconds())
    return ":".join(map(str, raw)) if isinstance(raw, tuple | list) else str(raw)


def _resolve(setting: Setting, given: Mapping[str, Any], environment: Mapping[str, str]) -> Value:
    if setting.name in given:
        raw, source = given[setting.name], "argument"
    elif environment.get(setting.variable):
        raw, source = environment[setting.variable], setting.variable
    else:
        return Value(setting.default, "default")
    if setting.parse in (path, token_path) and not isinstance(raw, str | os.PathLike):
        raise ConfigError(f"{setting.name}= is a {type(raw).__name__}, not a path", hint="give a str or a pathlib.Path")
    text = _as_text(raw)
    try:
        value = setting.parse(text)
    except ValueError as error:
        if source == "argument":
            raise ConfigError(f"{setting.name}={raw!r}: {error}", hint="give it in this form") from None
        raise ConfigError(f"{setting.variable}={raw!r}: {error}") from None
    if setting.choices and value not in setting.choices:
        raise ConfigError(
            f"{setting.name}={value!r} (from {source}) is not one of {', '.join(setting.choices)}",
            hint="give one of these, or leave it out" if source == "argument" else None,
        )
    return Value(value, source, text)
