"""Flags become a plan, or an error that says what is wrong with them."""

import os
import shlex
import socket
import sys

import pytest

from ferrorpc.cli.launcher.environment import given_settings
from ferrorpc.cli.launcher.plan import command_of, node_placement, process_count, world_range
from ferrorpc.cli.main import run
from ferrorpc.cli.run import make_plan
from ferrorpc.cli.system import available_cpus
from ferrorpc.errors import ConfigError


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("pass\n")
    return str(path)


@pytest.fixture(autouse=True)
def no_outer_settings(monkeypatch):
    for name in [name for name in os.environ if name.startswith("FERRORPC_")]:
        monkeypatch.delenv(name)


def test_a_script_runs_under_this_interpreter(script):
    assert command_of([script, "-x"], module=False, no_python=False) == (sys.executable, script, "-x")


def test_a_script_whose_name_begins_like_an_option_is_a_script_for_python_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-x.py").touch()
    assert command_of(["-x.py", "-x"], module=False, no_python=False) == (sys.executable, "./-x.py", "-x")


def test_a_module_and_a_program_run_as_such():
    assert command_of(["pkg.mod", "-x"], module=True, no_python=False) == (sys.executable, "-m", "pkg.mod", "-x")
    assert command_of(["sh", "-c", "true"], module=False, no_python=True) == ("sh", "-c", "true")


@pytest.mark.parametrize(
    ("target", "flags", "complaint"),
    [
        ([], {"module": False, "no_python": False}, "no script"),
        (["", "-x"], {"module": False, "no_python": False}, "no script"),
        ([""], {"module": True, "no_python": False}, "no script"),
        ([""], {"module": False, "no_python": True}, "no script"),
        (["missing.py"], {"module": False, "no_python": False}, "no file 'missing.py'"),
        (["no-such-program-here"], {"module": False, "no_python": True}, "no program"),
        (["x"], {"module": True, "no_python": True}, "exclude each other"),
    ],
)
def test_what_cannot_be_run_is_refused(target, flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        command_of(target, **flags)


@pytest.mark.parametrize(
    ("target", "advice"),
    [
        (["train.py"], "check the path"),
        (["python3", "train.py", "--fast"], "leave 'python3' out"),
        (["python3"], "say --no-python before it"),
        (["sh", "train.sh"], "say --no-python before it"),
    ],
)
def test_a_program_in_place_of_a_script_is_answered_with_what_was_meant(tmp_path, monkeypatch, target, advice):
    """As for mpirun and srun, which are given the interpreter."""
    (tmp_path / "python3").symlink_to(sys.executable)  # some systems have it only with its version
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ConfigError) as caught:
        command_of(target, module=False, no_python=False)
    assert advice in str(caught.value)


@pytest.mark.parametrize("first_line", ["#!/bin/sh", "#! /bin/bash -e", "#!/usr/bin/env zsh"])
def test_a_shell_script_in_place_of_a_script_is_told_from_python(tmp_path, first_line):
    """Python would call its second line a syntax error."""
    path = tmp_path / "train.sh"
    path.write_text(f"{first_line}\npython train.py\n")
    with pytest.raises(ConfigError, match="is a program, not a Python script\ntry: say --no-python before it"):
        command_of([str(path)], module=False, no_python=False)


def test_the_path_of_the_interpreter_in_place_of_a_script_is_told_from_python(script):
    with pytest.raises(ConfigError, match=f"is a program, not a Python script\ntry: leave '{sys.executable}' out"):
        command_of([sys.executable, script], module=False, no_python=False)


@pytest.mark.parametrize("first_line", ["", "#", "#!", "#!/usr/bin/env python3", "#!/usr/bin/env -S uv run --script", "sh = 1"])
def test_what_may_be_python_runs_under_this_interpreter(tmp_path, first_line):
    path = tmp_path / "train"
    path.write_text(f"{first_line}\npass\n")
    assert command_of([str(path)], module=False, no_python=False) == (sys.executable, str(path))


@pytest.mark.parametrize("script", ["-", "/dev/stdin", "/dev/fd/63", "/proc/self/fd/0"])
def test_a_script_that_only_the_launcher_has_open_is_refused(script):
    """As in `ferrorpc run /dev/stdin < train.py`, where two workers found nothing to run and all seemed well."""
    with pytest.raises(ConfigError, match="open in the launcher alone\ntry: save the script to a file"):
        command_of([script], module=False, no_python=False)


@pytest.mark.timeout(10)
def test_a_script_in_a_pipe_is_left_to_python(tmp_path):
    """It can be read only once."""
    os.mkfifo(path := tmp_path / "pipe")
    assert command_of([str(path)], module=False, no_python=False) == (sys.executable, str(path))


@pytest.mark.parametrize(
    ("mode", "advice"), [(0o644, r"chmod \+x train: .* or leave --no-python out"), (0o755, "say ./train"), (None, "spelling")]
)
def test_a_program_that_is_a_file_here_is_answered_with_what_it_lacks(tmp_path, monkeypatch, mode, advice):
    monkeypatch.chdir(tmp_path)
    if mode is not None:
        (tmp_path / "train").touch()
        (tmp_path / "train").chmod(mode)
    with pytest.raises(ConfigError, match=advice):
        command_of(["train"], module=False, no_python=True)


def test_a_missing_script_is_told_of_where_the_working_directory_is_gone_too(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="no file"):
        command_of(["train.py"], module=False, no_python=False)


def test_what_would_run_is_shown_as_a_shell_takes_it(script, capfd):
    words = [script, "--note=it's", "a b", "$(c);", ""]
    assert run(["run", "--dry-run", *words]) == 0
    (line,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("command "))
    assert shlex.split(line) == ["command", sys.executable, *words]


@pytest.mark.parametrize("arguments", [("-np", "4"), ("-np4",)])
def test_the_flag_of_mpirun_is_answered_with_ours(arguments, script, capfd):
    assert run(["run", *arguments, script, "--fast", "a b"]) == 64
    assert capfd.readouterr().err.endswith(f"\ntry: ferrorpc run -n 4 {script} --fast 'a b'\n")


@pytest.mark.parametrize("option", ["-n", "-n2", "--nproc-per-node", "--nproc_per_node=2", "--http-port"])
def test_an_option_after_the_script_is_the_scripts_which_is_told_where_one_worker_may_not_be_meant(option, script, capfd):
    assert run(["run", "--dry-run", script, option, "2"]) == 0
    said = capfd.readouterr()
    name = option.removesuffix("2").removesuffix("=")
    why = "options of `ferrorpc run` come before the script"
    assert said.err == f"ferrorpc run: one worker is started, and {name} goes to {script}: {why}\n"
    assert f"train.py {option} 2" in said.out


@pytest.mark.parametrize(
    "arguments",
    [
        ["-n", "2", "SCRIPT", "-n", "3"],
        ["SCRIPT", "--epochs", "2"],
        ["SCRIPT", "-t", "2"],
        ["--no-python", "nice", "-n", "3", "true"],
        ["SCRIPT", "2"],
    ],
)
def test_nothing_is_said_where_the_options_are_in_their_places(arguments, script, capfd):
    assert run(["run", "--dry-run", *(script if word == "SCRIPT" else word for word in arguments)]) == 0
    assert capfd.readouterr().err == ""


def test_process_counts(monkeypatch):
    assert process_count("3") == 3
    assert process_count("cpu") == available_cpus()
    devices = process_count("cpu") + 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(devices))))
    assert process_count("gpu") == process_count("auto") == devices
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, -1")
    assert process_count("gpu") == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert process_count("auto") == process_count("cpu")
    with pytest.raises(ConfigError, match="no CUDA device"):
        process_count("gpu")


@pytest.mark.parametrize("text", ["0", "-1", "many", "2.5", "4194305", "9" * 5000])
def test_a_process_count_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="expected a number"):
        process_count(text)


def test_one_node_starts_its_own_coordinator_on_a_free_port():
    rank, _, address, owns = node_placement((1, 1), None, None, standalone=False)
    assert rank == 0
    assert owns
    assert address.startswith("127.0.0.1:")


def test_a_given_coordinator_is_used_unless_standalone_is_asked_for():
    assert node_placement((1, 1), None, "h:1", standalone=False)[2:] == ("h:1", False)
    assert node_placement((1, 1), None, "h:1", standalone=True)[3]


@pytest.mark.parametrize("port", ["0", "00"])
def test_torchruns_any_free_port_is_a_coordinator_of_the_launchers_own(port, script):
    """Waiting for somebody there would end with exit code 75, as if a retry could help."""
    plan = make_plan(target=(script,), coordinator=f"localhost:{port}")
    assert plan.owns_coordinator
    assert not plan.coordinator.endswith(":0")


@pytest.mark.parametrize(
    ("nodes", "node_rank", "coordinator", "standalone", "complaint"),
    [
        ((2, 2), 0, None, False, "need one coordinator"),
        ((2, 2), 0, "h:1", True, "need one coordinator"),
        ((2, 2), 0, "h:0", False, "need one coordinator"),
        ((2, 2), 2, "h:1", False, "--node-rank 2"),
        ((2, 2), -1, "h:1", False, "--node-rank -1"),
    ],
)
def test_nodes_that_cannot_find_each_other_are_refused(nodes, node_rank, coordinator, standalone, complaint):
    with pytest.raises(ConfigError, match=complaint):
        node_placement(nodes, node_rank, coordinator, standalone=standalone)


def test_flags_go_before_the_environment_and_before_what_would_be_chosen(script, monkeypatch):
    monkeypatch.setenv("FERRORPC_COORDINATOR", "c:9")
    monkeypatch.setenv("FERRORPC_JOB", "night")
    plan = make_plan(target=(script,), coordinator="h:1", job="day", master_addr="m", master_port=7)
    assert (plan.coordinator, plan.job, plan.master) == ("h:1", "day", ("m", 7))


def test_the_coordinator_and_torchs_store_get_different_ports(script):
    plan = make_plan(target=(script,), processes="2")
    assert plan.coordinator != f"127.0.0.1:{plan.master[1]}"
    assert plan.label(1) == "1"


@pytest.mark.parametrize("flag", [True, False])
def test_any_free_port_for_the_page_is_chosen_once_and_kept(script, monkeypatch, flag):
    """The coordinator may be started again, and the page's address has been announced by then."""
    if not flag:
        monkeypatch.setenv("FERRORPC_HTTP_PORT", "0")
    plan = make_plan(target=(script,), http_port=0 if flag else None)
    assert plan.http_port
    assert set(plan.chosen_ports) == {int(plan.coordinator.rpartition(":")[2]), plan.master[1], plan.http_port}
    assert len(plan.chosen_ports) == 3
    assert make_plan(target=(script,), http_port=29701).chosen_ports[2:] == ()


def test_the_page_of_a_given_coordinator_is_not_the_launchers(script, monkeypatch):
    monkeypatch.setenv("FERRORPC_HTTP_PORT", "0")
    assert make_plan(target=(script,), coordinator="h:1").http_port is None


def test_a_machine_without_a_loopback_whose_coordinator_is_named_needs_but_torchs_port(script, monkeypatch):
    """As one with IPv6 alone."""
    monkeypatch.setattr("ferrorpc.cli.ports.LOOPBACK", "192.0.2.1")  # of the documentation's network: nobody has it
    with pytest.raises(ConfigError, match=r"bring the loopback interface up.*; or give --master-port"):
        make_plan(target=(script,), coordinator="[::1]:29700")
    assert make_plan(target=(script,), coordinator="[::1]:29700", master_port=29500).master[1] == 29500
    with pytest.raises(ConfigError, match="bring the loopback interface up") as raised:
        make_plan(target=(script,), master_port=29500)
    assert "--master-port" not in raised.value.hint


def test_labels_name_the_node_where_there_are_several(script):
    plan = make_plan(target=(script,), processes="2", nodes="2", node_rank=1, coordinator="h:1")
    assert plan.label(1) == "node1:3"
    assert plan.master == ("h", 29500)
    elastic = make_plan(target=(script,), processes="2", nodes="1:2", node_rank=1, coordinator="h:1")
    assert elastic.label(1) == "node1-1"


def test_without_a_node_rank_a_fixed_world_leaves_ranks_to_the_coordinator(script):
    plan = make_plan(target=(script,), processes="2", nodes="2", coordinator="h:1")
    assert not plan.elastic
    assert plan.rank(1) is None
    assert plan.label(1) == f"{socket.gethostname()}-1"


def test_the_environment_names_the_coordinator_and_the_job(script, monkeypatch):
    monkeypatch.setenv("FERRORPC_COORDINATOR", "c:9")
    monkeypatch.setenv("FERRORPC_JOB", "night")
    plan = make_plan(target=(script,))
    assert (plan.coordinator, plan.owns_coordinator, plan.job) == ("c:9", False, "night")
    assert plan.master[0] == "127.0.0.1", "torch's rank 0 is here, wherever the coordinator is"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "(started by the launcher; this is a worker of another launcher, whose job it does not join)"),
        (["--standalone", "--job", "day"], "(started by the launcher; this is a worker of another"),
        (["--job", "day"], "coordinator c:9 (given)"),
        (["--coordinator", "h:1"], "coordinator h:1 (given)"),
    ],
)
def test_in_a_worker_of_another_launcher_a_job_of_its_own_is_started_unless_flags_name_one(
    flags, said, script, monkeypatch, capfd
):
    outer = {"COORDINATOR": "c:9", "JOB": "night", "WORLD_SIZE": "3:4", "LAUNCH": "0a1b2c3d"}
    for name, value in outer.items():
        monkeypatch.setenv(f"FERRORPC_{name}", value)
    monkeypatch.setenv("FERRORPC_GIVEN", given_settings(os.environ))
    assert run(["run", "-n", "2", *flags, "--dry-run", script]) == 0
    assert said in capfd.readouterr().out


def test_a_console_filter_must_name_local_ranks(script):
    assert make_plan(target=(script,), processes="4", shown="0, 3").shown == {0, 3}
    for text in ("4", "0,", "-1", "9" * 5000):
        with pytest.raises(ConfigError, match="local ranks from 0 to 3"):
            make_plan(target=(script,), processes="4", shown=text)


def test_a_world_is_all_workers_of_all_nodes_unless_it_may_shrink():
    assert world_range(None, (2, 2), 4) == (8, 8)
    assert world_range(None, (1, 3), 4) == (4, 12)
    assert world_range("2:4", (1, 1), 4) == (2, 4)


@pytest.mark.parametrize("nodes", ["2000000000", "1:2000000000"])
def test_more_workers_than_any_world_has_are_refused_by_the_launcher_not_by_each_of_them(nodes, script):
    with pytest.raises(ConfigError, match="2000000000 nodes with 2 workers each are a world of 4000000000: expected"):
        make_plan(target=(script,), processes="2", nodes=nodes, coordinator="127.0.0.1:29700")


def test_a_range_of_world_sizes_may_be_a_variable(script, monkeypatch):
    monkeypatch.setenv("FERRORPC_WORLD_SIZE", "2:4")
    assert make_plan(target=(script,), processes="4").world == (2, 4)
    assert make_plan(target=(script,), processes="4", world="3:4").world == (3, 4)
    with pytest.raises(ConfigError, match="FERRORPC_WORLD_SIZE=2:4 with 2 workers in all"):
        make_plan(target=(script,), processes="2")


def test_a_world_size_that_is_a_variable_must_be_that_of_the_workers_on_one_node(script, monkeypatch):
    monkeypatch.setenv("FERRORPC_WORLD_SIZE", "8")
    assert make_plan(target=(script,), processes="8").world == (8, 8)
    assert make_plan(target=(script,), processes="4", nodes="1:2", coordinator="h:1").world == (4, 8)
    with pytest.raises(ConfigError, match="FERRORPC_WORLD_SIZE=8 with 4 workers in all"):
        make_plan(target=(script,), processes="4")


@pytest.mark.parametrize("text", ["2:3", "4:2", "two", "5"])
def test_a_world_that_its_nodes_cannot_make_is_refused(text):
    with pytest.raises(ConfigError, match=f"--world-size {text}"):
        world_range(text, (1, 1), 4)


def test_one_node_with_a_world_that_may_shrink_leaves_ranks_to_the_coordinator(script):
    plan = make_plan(target=(script,), processes="4", world="2:4")
    assert plan.elastic
    assert plan.rank(1) is None


@pytest.mark.parametrize("job", ["a b", "b/c", "naïve", "j" * 129])
def test_a_name_that_no_coordinator_takes_is_refused_before_anything_is_started(job, script):
    with pytest.raises(ConfigError, match="job="):
        make_plan(target=(script,), job=job)


def test_a_name_may_be_as_long_as_a_coordinator_takes_it(script):
    assert make_plan(target=(script,), job="j" * 128).job == "j" * 128


def test_command_lines_of_torchrun_work_as_they_are(script, capfd):
    flags = "--nproc_per_node=2 --rdzv-backend=c10d --rdzv_id=7 --monitor_interval=1 --start-method spawn --tee 3 --role=t"
    more = "--rdzv_conf timeout=900,join_timeout=60 -r 3 -t 0:3,1:1 --redirects=0 --max_restarts=3"
    assert run(["run", "--dry-run", *flags.split(), *more.split(), script]) == 0
    shown = capfd.readouterr().out
    assert shown.count("ROLE_NAME=t\n") == 2
    assert shown.count("FERRORPC_JOB=7\n") == 2


def test_rare_flags_of_torchrun_are_taken_too(script, capfd):
    flags = "--logs-specs=mine --duplicate_stdout_filters a,b --duplicate-stderr-filters c --event-log-handler=console"
    more = "--signals-to-handle SIGTERM,SIGUSR1 --numa_binding=node --run-path -n 2"
    assert run(["run", "--dry-run", *flags.split(), *more.split(), script]) == 0
    assert capfd.readouterr().out.count("LOCAL_WORLD_SIZE=2\n") == 2


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("--local_addr=10.0.0.1", "FERRORPC_ADVERTISE"), ("--virtual-local-rank", "CUDA_VISIBLE_DEVICES")],
)
def test_flags_of_torchrun_that_cannot_be_left_out_are_refused_with_what_to_do(flag, instead, script, capfd):
    assert run(["run", "--dry-run", flag, script]) == 64
    assert instead in capfd.readouterr().err


def test_a_rendezvous_that_the_coordinator_cannot_stand_for_is_refused(script, capfd):
    assert run(["run", "--rdzv-backend=etcd-v2", script]) == 64
    assert "c10d" in capfd.readouterr().err
