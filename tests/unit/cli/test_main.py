"""The `ferrorpc` program: its help is fast, and its exit codes are exact."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import version

import pytest

from ferrorpc.cli import client, demo, run as run_module
from ferrorpc.cli.bench.command import MEASUREMENTS, command as bench
from ferrorpc.cli.main import COMMANDS, cli, run
from ferrorpc.config import SETTINGS
from ferrorpc.errors import AuthenticationError, CodecError, ConfigError


def test_every_command_of_the_table_exists_under_its_name():
    for group, names in ((cli, COMMANDS), (bench, MEASUREMENTS)):
        for name in names:
            command = group.get_command(None, name)
            assert command is not None
            assert command.help


def test_help_shows_every_command_and_loads_neither_grpc_nor_numpy():
    script = (
        "import sys\nfrom ferrorpc.cli.main import run\n"
        "assert run(['--help']) == 0\n"
        "assert not {'grpc', 'numpy', 'google.protobuf'} & set(sys.modules), 'help must be immediate'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    for name in COMMANDS:
        assert f"\n  {name} " in result.stdout


def test_an_interrupt_while_the_program_is_imported_ends_it_without_a_traceback(tmp_path):
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(7)\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "ferrorpc", "version"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")
    ignoring = ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command]  # as under nohup
    ended = subprocess.run(ignoring, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 7


def test_the_package_is_the_command_where_no_script_is_on_the_path():
    command = [sys.executable, "-m", "ferrorpc", "status", "--no-such-option"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, "Usage: ferrorpc status" in result.stderr) == (64, True)


def test_what_standard_output_cannot_encode_is_shown_as_escapes():
    environment = os.environ | {"PYTHONIOENCODING": "latin-1", "FERRORPC_TRACE_DIR": "größe → 1"}
    command = [sys.executable, "-m", "ferrorpc", "config"]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="latin-1", timeout=60, check=False)
    assert (done.returncode, r"größe \u2192 1" in done.stdout) == (0, True), done.stderr


def test_the_launcher_loads_neither_grpc_nor_numpy():
    script = "import sys\nimport ferrorpc.cli.run\nassert not {'grpc', 'numpy', 'google.protobuf'} & set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["run", "--no-such-flag", "x.py"],
        ["run", "missing.py"],
        ["run"],
        ["run", "-n", "0", "x.py"],
        ["run", "--grace", "nan", __file__],
        ["run", "--log-dir", "", "--dry-run", __file__],
        ["run", "--log-dir", __file__, "--dry-run", __file__],
        ["run", "--http-port", "70000", __file__],
        ["run", "--master-port", "-1", __file__],
        ["run", "--ranks", "\u00b2", __file__],
        ["plan", "pipeline", "--schedule", "foo"],
        ["plan", "pipeline", "--schedule", "dualpipe_v", "--microbatches", "2"],
        ["plan", "all_reduce", "--algorithm", "foo"],
        ["plan", "gather", "--algorithm", "ring"],
        ["demo", "--seed", "-1"],
        ["demo", "--out", "."],
    ],
)
def test_bad_configuration_is_64(arguments, capfd):
    assert run(arguments) == 64
    assert capfd.readouterr().err


def test_a_script_without_run_before_it_is_64_and_the_right_command_is_named(capfd):
    assert run(["train.py", "--lr", "1"]) == 64
    assert "start it with `ferrorpc run -n 4 train.py`" in capfd.readouterr().err


def test_a_package_that_is_missing_is_64_and_its_extra_is_named(monkeypatch, capfd, tmp_path):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.delitem(sys.modules, "ferrorpc.cli.authority", raising=False)
    assert run(["certs", "init", str(tmp_path / "certs"), "--job", "trial"]) == 64
    assert "try: pip install 'ferrorpc[certs]'" in capfd.readouterr().err


@pytest.mark.parametrize(("error", "code"), [(AuthenticationError("no token"), 64), (CodecError("no message"), 1)])
def test_an_error_of_a_command_has_the_code_of_its_class(monkeypatch, error, code):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(cli, "main", fail)
    assert run(["status"]) == code


@pytest.mark.parametrize("arguments", [[], ["plan"], ["certs"]])
def test_a_group_without_a_command_shows_its_help(arguments, capfd):
    assert run(arguments) == 0
    assert "\nCommands:\n" in capfd.readouterr().out


def test_an_unreachable_coordinator_is_75_and_says_where(capfd):
    assert run(["status", "--coordinator", "127.0.0.1:1"]) == 75
    err = capfd.readouterr().err
    assert "127.0.0.1:1" in err
    assert "\ntry: " in err


@pytest.mark.parametrize("arguments", [["status", "--coordinator"], ["health", "--addr"], ["remove", "w0", "--addr"]])
@pytest.mark.parametrize("address", ["somewhere", "host:99999", ""])
def test_what_is_no_address_is_64_and_named(arguments, address, capfd):
    assert run([*arguments, address]) == 64
    assert capfd.readouterr().err.startswith(f"ferrorpc: coordinator={address!r}: expected HOST:PORT")


@pytest.mark.parametrize("address", ["somewhere", "fd00::1:29700"])
def test_a_launcher_names_what_is_no_address_likewise(address, capfd):
    assert run(["run", "--rdzv-endpoint", address, __file__]) == 64
    assert capfd.readouterr().err.startswith(f"ferrorpc: coordinator={address!r}: expected HOST:PORT, such as")


def test_a_coordinator_that_nobody_named_is_not_there_says_where_the_address_is_told(capfd, monkeypatch):
    monkeypatch.delenv("FERRORPC_COORDINATOR", raising=False)
    monkeypatch.setattr(client, "DEFAULT_PORT", 1)
    assert run(["status"]) == 75
    assert "try: pass --coordinator HOST:PORT; " in capfd.readouterr().err


def test_health_of_nobody_is_1(capfd):
    assert run(["health", "--addr", "127.0.0.1:1", "--timeout", "2"]) == 1
    assert "127.0.0.1:1: UNAVAILABLE" in capfd.readouterr().err


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e10", "0"])
def test_a_time_that_nobody_can_wait_is_64(seconds, capfd):
    assert run(["bench", "all_reduce", "--seconds", seconds]) == 64
    assert run(["health", "--addr", "127.0.0.1:1", "--timeout", seconds]) == 64
    assert "--timeout" in capfd.readouterr().err


def test_config_shows_each_value_and_where_it_came_from(capfd, monkeypatch):
    monkeypatch.setenv("FERRORPC_LEASE", "500ms")
    monkeypatch.setenv("FERRORPC_WORLD_SIZE", "2:4")
    assert run(["config", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert set(found) == {setting.name for setting in SETTINGS}
    assert found["lease"] == {"value": 0.5, "source": "FERRORPC_LEASE", "variable": "FERRORPC_LEASE"}
    assert found["grace"]["source"] == "default"
    assert run(["config"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row[:3] for row in rows if row[0] == "FERRORPC_WORLD_SIZE"] == [
        ["FERRORPC_WORLD_SIZE", "2:4", "FERRORPC_WORLD_SIZE"]
    ]


def test_a_bad_variable_is_64_and_named(capfd, monkeypatch):
    monkeypatch.setenv("FERRORPC_LEASE", "soon")
    assert run(["status"]) == 64
    assert "FERRORPC_LEASE='soon'" in capfd.readouterr().err


def test_config_shows_everything_also_where_values_are_wrong(capfd, monkeypatch):
    """Errors elsewhere say to run it."""
    monkeypatch.setenv("FERRORPC_LEASE", "soon")
    monkeypatch.setenv("FERRORPC_TRANSPORT", "pigeon")
    monkeypatch.setenv("FERRORPC_GRACE", "500ms")
    assert run(["config"]) == 64
    out, err = capfd.readouterr()
    rows = {row.split()[0]: row.split()[1:4] for row in out.splitlines()}
    assert rows.keys() >= {setting.variable for setting in SETTINGS}
    assert rows["FERRORPC_LEASE"] == ["soon", "FERRORPC_LEASE", "(WRONG)"]
    assert rows["FERRORPC_GRACE"][:2] == ["0.5", "FERRORPC_GRACE"]
    assert "FERRORPC_LEASE='soon': expected seconds" in err
    assert err.endswith("\ntry: correct or unset FERRORPC_TRANSPORT, FERRORPC_LEASE\n")
    assert run(["config", "--json"]) == 64
    found = json.loads(capfd.readouterr().out)
    assert set(found) == {setting.name for setting in SETTINGS}
    assert "is not one of auto, grpc, shared_memory" in found["transport"]["error"]
    assert "error" not in found["grace"]


def test_config_looks_at_the_form_of_values_alone_and_says_who_looks_further(capfd, monkeypatch):
    monkeypatch.setenv("FERRORPC_COST_TABLE", "/nowhere")
    assert run(["config"]) == 0
    assert run(["config", "--help"]) == 0
    assert "`ferrorpc doctor`" in capfd.readouterr().out


def test_version_says_what_is_installed(capfd):
    assert run(["version", "-v"]) == 0
    out = capfd.readouterr().out
    assert "grpcio" in out
    assert "python" in out


@pytest.mark.parametrize(
    ("installed", "shown"),
    [
        ({"nvidia-nccl-cu13": "2.28"}, ["cupy-cuda12x or cupy-cuda13x not installed", "nvidia-nccl-cu13 2.28"]),
        ({"cupy-cuda12x": "14.0", "nvidia-nccl-cu12": "2.27"}, ["cupy-cuda12x 14.0", "nvidia-nccl-cu12 2.27"]),
    ],
)
def test_version_names_the_packages_of_either_cuda(monkeypatch, capfd, installed, shown):
    monkeypatch.setattr("ferrorpc.cli.version.version_of", lambda name: installed.get(name, ""))
    assert run(["version", "-v"]) == 0
    rows = [" ".join(line.split()) for line in capfd.readouterr().out.splitlines()]
    assert [row for row in rows if row.startswith(("cupy", "nvidia"))] == shown


def test_the_version_is_also_an_option(capfd):
    assert run(["--version"]) == 0
    assert capfd.readouterr().out.strip() == version("ferrorpc")


def test_the_option_says_so_where_ferrorpc_is_no_installed_distribution(monkeypatch, capfd):
    monkeypatch.setattr("ferrorpc.versions.version_of", lambda name: "")
    assert run(["--version"]) == 0
    assert capfd.readouterr().out.strip() == "0+unknown"


def test_a_file_that_cannot_be_written_is_64_and_named_without_a_traceback(capfd, tmp_path):
    path = tmp_path / "missing" / "plan.svg"
    assert run(["plan", "pipeline", "--schedule", "zbv", "--svg", str(path)]) == 64
    assert capfd.readouterr().err.startswith(f"ferrorpc: {path}: No such file or directory\ntry: ")


@pytest.mark.parametrize("arguments", [["config"], ["plan", "--help"]])
def test_a_reader_that_goes_away_is_no_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ferrorpc", *arguments]
    with open(writer, "wb") as nobody:
        result = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (128 + 13, b"")


def test_an_error_that_nobody_reads_is_one_of_a_closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        command = [sys.executable, "-m", "ferrorpc", "run", "absent.py"]
        assert subprocess.run(command, stdout=nobody, stderr=nobody, timeout=60).returncode == 141


def test_a_shell_gets_its_completion(monkeypatch, capfd):
    monkeypatch.setenv("_FERRORPC_COMPLETE", "bash_source")
    assert run([]) == 0
    assert "_ferrorpc_completion" in capfd.readouterr().out


def test_a_machine_without_room_for_temporary_files_is_64_and_says_where_it_is_looked_for(monkeypatch, capfd):
    def nowhere(**names):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    assert run(["run", "--no-python", "true"]) == 64
    err = capfd.readouterr().err
    assert "found in ['/tmp']" in err
    assert "TMPDIR" in err


def test_help_of_the_coordinator_shows_the_services_own_options():
    command = [sys.executable, "-m", "ferrorpc", "coordinator", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "usage: ferrorpc coordinator" in result.stdout
    assert "--http-port PORT" in result.stdout


def test_a_page_of_a_coordinator_that_is_there_already_is_64(capfd):
    assert run(["run", "--coordinator", "127.0.0.1:1", "--http-port", "0", __file__]) == 64
    assert "ferrorpc coordinator" in capfd.readouterr().err


def test_the_demo_names_the_extra_that_is_missing(monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda module: None if module == "sklearn" else object())
    with pytest.raises(ConfigError, match=r"the demo needs scikit-learn\ntry: pip install \"ferrorpc\[examples\]\""):
        demo.check_packages()


def test_the_demo_trains_nothing_where_it_could_not_write_its_picture(tmp_path, capfd):
    assert run(["demo", "-n", "1", "--epochs", "1", "--out", "/proc/loss.png"]) == 64
    assert capfd.readouterr().err.startswith("ferrorpc: /proc/loss.png: ")
    assert run(["demo", "-n", "1", "--epochs", "1", "--out", str(tmp_path / "loss.txt")]) == 64
    assert "matplotlib draws no txt" in capfd.readouterr().err
    (tmp_path / "file").touch()
    assert run(["demo", "-n", "1", "--epochs", "1", "--out", str(tmp_path / "file" / "loss.png")]) == 64
    assert capfd.readouterr().err.startswith(f"ferrorpc: {tmp_path / 'file'}: ")


@pytest.mark.parametrize("size", ["3", "1:4"])
def test_the_demo_has_as_many_processes_as_it_is_asked_for(size, monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr(demo, "check_packages", lambda: None)
    monkeypatch.setattr(run_module, "launch", lambda plan, environment: plans.append(plan) or 1)
    monkeypatch.setenv("FERRORPC_WORLD_SIZE", size)
    assert run(["demo", "-n", "2", "--out", str(tmp_path / "loss.png")]) == 1
    assert [plan.world for plan in plans] == [(2, 2)]


def test_the_demo_finds_its_script():
    assert demo.find_script().name == "digits_ddp.py"


def test_the_demo_says_where_it_looked_for_its_script(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "_PLACES", (tmp_path, tmp_path / "b"))
    with pytest.raises(ConfigError, match="neither in"):
        demo.find_script()
