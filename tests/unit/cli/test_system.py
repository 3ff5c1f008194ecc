"""What commands learn of the system, such as the CPUs that are available within the limits of control groups."""

import os
import shutil
import sys

import pytest

from ferrorpc import control_groups
from ferrorpc.cli import system
from ferrorpc.errors import ConfigError

EIGHT = set(range(8))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Eight processors; sets this process's line in /proc/self/cgroup, and files of control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: EIGHT)
    monkeypatch.setattr(control_groups, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(control_groups, "_OWN_GROUPS", tmp_path / "own")

    def write(own, **files):
        (tmp_path / "own").write_text(own)
        for path, text in files.items():
            file = tmp_path / "groups" / path.replace("__", "/").replace("_DOT_", ".")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


def test_without_control_groups_all_that_it_may_run_on(machine):
    assert system.available_cpus() == 8


@pytest.mark.parametrize(("text", "count"), [("max 100000", 8), ("250000 100000", 3), ("10000 100000", 1), ("nonsense", 8)])
def test_a_container_sees_its_own_limit_at_the_root(machine, text, count):
    machine("0::/\n", cpu_DOT_max=text)
    assert system.available_cpus() == count


def test_a_container_whose_path_is_the_hosts(machine):
    machine("0::/kubepods/pod7/container\n", cpu_DOT_max="200000 100000")
    assert system.available_cpus() == 2


def test_the_tightest_of_the_groups_around_it_counts(machine):
    machine("0::/user/job\n", user__cpu_DOT_max="300000 100000", user__job__cpu_DOT_max="500000 100000")
    assert system.available_cpus() == 3


@pytest.mark.parametrize(("quota", "count"), [("-1", 8), ("400000", 4)])
def test_the_first_versions_files(machine, quota, count):
    own = "3:cpuset:/elsewhere\n1:cpu,cpuacct:/docker/abc\n"
    machine(own, **{"cpu,cpuacct__cpu_DOT_cfs_quota_us": quota, "cpu,cpuacct__cpu_DOT_cfs_period_us": "100000"})
    assert system.available_cpus() == count


def test_another_system_is_named(monkeypatch):
    monkeypatch.setattr(system.sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="the launcher needs Linux, and this is darwin"):
        system.require_linux("the launcher", "try that")


def test_a_command_is_shown_as_the_shell_finds_it(tmp_path, monkeypatch):
    folder = tmp_path / ".venv" / "bin"
    folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert system.own_command() == f"{folder}/python -m ferrorpc"
    (folder / "ferrorpc").touch()
    assert system.own_command() == f"{folder}/ferrorpc"
    monkeypatch.chdir(tmp_path)
    assert system.own_command() == ".venv/bin/ferrorpc", "as typed here: the environment is not activated"
    monkeypatch.setattr(shutil, "which", lambda name: str(folder / name))
    assert system.own_command() == "ferrorpc"
    (tmp_path / "ferrorpc").touch()
    monkeypatch.setattr(shutil, "which", lambda name: str(tmp_path / name))
    assert system.own_command() == ".venv/bin/ferrorpc", "what is on the PATH is another one"


def test_a_command_can_be_shown_in_a_directory_that_was_removed(tmp_path, monkeypatch):
    folder, gone = tmp_path / "bin", tmp_path / "gone"
    folder.mkdir()
    gone.mkdir()
    (folder / "ferrorpc").touch()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert system.own_command() == f"{folder}/ferrorpc"
