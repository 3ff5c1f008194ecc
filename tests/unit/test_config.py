"""Settings: where a value comes from, and what is refused."""

import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ferrorpc.config import (
    GIVEN_VARIABLE,
    LAUNCH_VARIABLE,
    SETTINGS,
    Config,
    SettingArguments,
    host_name,
    path,
    plain_name,
    seconds,
    size_bytes,
    token_path,
    unknown_settings,
    world_size,
)
from ferrorpc.errors import ConfigError


def test_argument_beats_variable_beats_default() -> None:
    environment = {"FERRORPC_LEASE": "500ms", "FERRORPC_JOB": "night"}
    config = Config({"job": "day"}, environment)
    assert (config["job"], config.source("job")) == ("day", "argument")
    assert (config["lease"], config.source("lease")) == (0.5, "FERRORPC_LEASE")
    assert (config["grace"], config.source("grace")) == (2.0, "default")


@pytest.mark.parametrize(("text", "value"), [("60", 60.0), ("0.5", 0.5), ("500ms", 0.5), ("2min", 120.0), ("1h", 3600.0)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(("text", "value"), [("4MiB", 4 << 20), ("1048576", 1 << 20), ("512KiB", 1 << 19), ("1kB", 1000)])
def test_sizes(text: str, value: int) -> None:
    assert size_bytes(text) == value


def test_world_sizes() -> None:
    assert world_size("4") == (4, 4)
    assert world_size("2:8") == (2, 8)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FERRORPC_LEASE", "soon"),
        ("FERRORPC_LEASE", "1e400"),
        ("FERRORPC_HEARTBEAT_INTERVAL", "0"),
        ("FERRORPC_STALL", "1e300"),
        ("FERRORPC_WORLD_SIZE", "0"),
        ("FERRORPC_WORLD_SIZE", "4:2"),
        ("FERRORPC_COORDINATOR", "nowhere"),
        ("FERRORPC_COORDINATOR", "host:99999"),
        ("FERRORPC_COORDINATOR", "host..example:29700"),
        ("FERRORPC_TRANSPORT", "pigeon"),
        ("FERRORPC_PORT", "70000"),
        ("FERRORPC_HTTP_PORT", "-1"),
        ("FERRORPC_RANK_HINT", "first"),
        ("FERRORPC_RANK_HINT", "99999999999"),
        ("FERRORPC_WORLD_SIZE", "2:99999999999"),
        ("FERRORPC_INSECURE", "maybe"),
        ("FERRORPC_BIND", "127.0.0.1:29701"),
        ("FERRORPC_BIND", "[::1]:29701"),
        ("FERRORPC_ADVERTISE", "node1:29701"),
        ("FERRORPC_ADVERTISE", "node 1"),
        ("FERRORPC_ADVERTISE", "http://node1"),
    ],
)
def test_a_wrong_value_names_its_variable(variable: str, text: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        Config(environment={variable: text})


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "[::1]", "fe80::1%eth0", "node1.example", "localhost"])
def test_a_host_is_a_name_or_an_address_of_either_family(text: str) -> None:
    assert Config(environment={"FERRORPC_BIND": text})["bind"] == text


def test_the_variable_that_kubernetes_sets_for_a_service_is_explained() -> None:
    with pytest.raises(ConfigError, match="enableServiceLinks: false"):
        Config(environment={"FERRORPC_PORT": "tcp://10.96.0.17:29700"})


def test_a_script_may_change_its_directory_after_its_settings_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As hydra does. A token that was given in place of its file is no path, and so no message shows it."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").touch()
    monkeypatch.chdir(tmp_path / "here")
    config = Config({"token_file": "token", "tls_ca": "../ca.pem", "trace_dir": "traces"}, {})
    mistaken = Config({"token_file": "a-token-in-place-of-its-file"}, {})
    monkeypatch.chdir(tmp_path / "there")
    assert config["token_file"] == str(tmp_path / "here" / "token")
    assert config["tls_ca"] == str(tmp_path / "here" / ".." / "ca.pem")
    assert config["trace_dir"] == str(tmp_path / "here" / "traces")
    assert mistaken["token_file"] == "a-token-in-place-of-its-file"


def test_a_relative_path_in_a_directory_that_is_gone_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not be needed, and no message may show a token that was given in place of its path."""
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    config = Config({"tls_ca": "ca.pem", "token_file": "a-token"}, {})
    assert (config["tls_ca"], config["token_file"]) == ("ca.pem", "a-token")


def test_an_unknown_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match="wrold_size"):
        Config({"wrold_size": 4}, {})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("init_method", "coordinator="),
        ("rank", "rank_hint="),
        ("group_name", "job="),
        ("device_id", "device="),
        ("store", "group.store"),
        ("master_addr", "coordinator="),
        ("local_rank", "ferrorpc run"),
    ],
)
def test_an_argument_of_torchs_is_told_its_counterpart(name: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config({name: "x"}, {})
    assert name in caught.value.message
    assert hint in caught.value.hint


def test_an_argument_with_a_letter_wrong_is_told_which_is_meant() -> None:
    with pytest.raises(ConfigError, match=r"wrold_size\ntry: world_size="):
        Config({"wrold_size": 4}, {})


def test_every_setting_has_a_type_as_an_argument() -> None:
    own = {"backend", "transport", "timeout"}
    assert SettingArguments.__optional_keys__ | own == {setting.name for setting in SETTINGS}


def test_every_setting_has_a_help_text_and_a_default_it_accepts() -> None:
    for setting in SETTINGS:
        assert setting.help
        if setting.choices:
            assert setting.default in setting.choices


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("timeout", 2, 2.0),
        ("timeout", 0.5, 0.5),
        ("timeout", timedelta(minutes=2), 120.0),
        ("world_size", 4, (4, 4)),
        ("world_size", (2, 4), (2, 4)),
        ("insecure", True, True),
        ("port", 29800, 29800),
        ("token_file", Path("secrets/token"), "secrets/token"),
    ],
)
def test_an_argument_may_have_its_natural_type(name, given, value):
    assert Config({name: given}, {})[name] == value


@pytest.mark.parametrize(
    ("name", "given"),
    [("timeout", -1), ("timeout", [1, 2]), ("world_size", 0), ("world_size", (3, 2)), ("coordinator", 5), ("port", 1.5)],
)
def test_an_argument_is_held_to_the_rules_of_its_variable(name, given):
    with pytest.raises(ConfigError, match=name):
        Config({name: given}, {})


def test_variables_that_are_called_like_settings_and_are_none_come_with_what_is_meant():
    given = {
        "FERRORPC_WORLDSIZE": "FERRORPC_WORLD_SIZE",
        "FERRORPC_TIMOUT": "FERRORPC_TIMEOUT",
        "FERRORPC_BACKENDS": "FERRORPC_BACKEND",
        "FERRORPC_RANK": "FERRORPC_RANK_HINT",
        "FERRORPC_TOKEN": "FERRORPC_TOKEN_FILE",
        "FERRORPC_TIMEOUT_SECONDS": "FERRORPC_TIMEOUT",
        "FERRORPC_TLS": "",  # one of three
        "FERRORPC_SEED": "",  # a program's own
        "FERRORPC_COORDINATOR_PORT": "",  # Kubernetes sets it for a service called ferrorpc-coordinator
    }
    others = dict.fromkeys(
        [LAUNCH_VARIABLE, GIVEN_VARIABLE, "PATH", "NCCL_DEBUG", *(setting.variable for setting in SETTINGS)], "1"
    )
    assert unknown_settings(given | others) == sorted(given.items())


@pytest.mark.parametrize(
    ("name", "plain"), [("node7.lan", "node7.lan"), ("Jürgens Rechner", "J-rgens-Rechner"), ("h\udcf4te/1", "h-te-1")]
)
def test_a_host_whose_name_no_member_may_have_gets_a_plain_one(monkeypatch: pytest.MonkeyPatch, name: str, plain: str) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert host_name() == plain
    assert plain_name(f"{plain}-0")


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.parse in (path, token_path)])
@pytest.mark.parametrize("given", ["a\0b", False, 1j, ["a", "b"], b"a", object()], ids=lambda given: type(given).__name__)
def test_a_path_is_a_text_without_a_byte_of_zero(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Config({name: given}, {})


@pytest.mark.parametrize("name", [setting.name for setting in SETTINGS if setting.parse is path])
def test_an_empty_path_is_refused_and_an_empty_variable_counts_as_not_set(name: str) -> None:
    """A command line with a variable that is not set: `--data-dir "$UNSET"` would fill the working directory."""
    with pytest.raises(ConfigError, match="expected a path"):
        Config({name: ""}, {})
    assert Config({}, {f"FERRORPC_{name.upper()}": ""})[name] is None


def test_no_job_is_called_as_a_directory_itself_or_the_one_above() -> None:
    for job in (".", ".."):
        with pytest.raises(ConfigError, match="a name that can be that of a directory"):
            Config({"job": job}, {})
    assert Config({"job": "..."}, {})["job"] == "..."
