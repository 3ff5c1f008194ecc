"""`ferrorpc demo`, as a newcomer runs it."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import termios

from ferrorpc.cli.demo import check_packages
from tests.integration.launching import environment, needs

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
pytestmark = needs("sklearn", "tqdm", "matplotlib")


def test_the_demo_learns_holds_equal_weights_and_draws_its_loss(tmp_path):
    check_packages()
    out = tmp_path / "pictures" / "loss.png"
    result = subprocess.run(
        [sys.executable, "-m", "ferrorpc", "demo", "-n", "3", "--epochs", "12", "--out", str(out)],
        capture_output=True, text=True, timeout=110, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"^0: test accuracy ([0-9.]+)$", result.stdout, re.MULTILINE)[1]) >= 0.95
    assert "\n0: identical weights on 3 ranks\n" in result.stdout
    assert out.read_bytes().startswith(PNG_SIGNATURE)
    assert "training: 100%" in result.stderr


def test_ctrl_c_ends_the_demo_without_a_word_of_its_workers(tmp_path):
    """On a terminal, where progress is shown at once."""
    terminal, other_end = pty.openpty()
    termios.tcsetwinsize(terminal, (25, 80))
    quiet = environment() | {"NO_COLOR": "1", "FERRORPC_LOG_LEVEL": "ERROR"}  # on a slow machine waits are explained
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrorpc", "demo", "-n", "2", "--epochs", "100000", "--out", "loss.png"],
        stdout=subprocess.DEVNULL, stderr=other_end, env=quiet, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(other_end)
    with open(terminal, "rb", buffering=0) as shown:
        said = b""
        try:
            while b"training:" not in said:
                said += shown.read(4096)
        finally:
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
            while more := shown.read(4096):
                said += more
    assert process.wait(30) == 128 + signal.SIGINT
    lines = [line for line in re.split(r"[\r\n]+|\x1b\[2K", said.decode()) if line and "training:" not in line]
    assert [line for line in lines if not line.startswith("ferrorpc: ")] == []
    assert lines[-1] == "ferrorpc: stopped by SIGINT"
