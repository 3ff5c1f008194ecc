"""The exec shim, run as a script."""

import os
import subprocess

import pytest

from ferrorpc.cli.launcher import exec_shim


def execute(launcher_pid, *command):
    line = exec_shim.tied_to_this_process([*command])
    line[line.index(str(os.getpid()))] = str(launcher_pid)
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_a_child_whose_launcher_is_gone_already_does_not_begin():
    result = execute(os.getppid(), "echo", "began")
    assert (result.returncode, result.stdout) == (128 + 9, "")


@pytest.mark.parametrize(("content", "code"), [(None, 127), ("echo no interpreter line\n", 126)])
def test_what_cannot_be_run_ends_as_in_a_shell_and_is_named(tmp_path, content, code):
    program = tmp_path / "program"
    if content is not None:
        program.write_text(content)
        program.chmod(0o755)
    result = execute(os.getpid(), str(program))
    assert (result.returncode, str(program) in result.stderr) == (code, True)
