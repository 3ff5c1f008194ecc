"""`ferrorpc demo`, as a newcomer runs it."""

import re
import signal
import subprocess
import sys
from importlib.util import find_spec

import pytest

from ferrorpc.cli.demo import check_packages
from tests.integration.launching import environment

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sklearn", "tqdm", "matplotlib"))), reason="the extra `examples` is not installed"
)


@pytest.mark.parametrize("processes", [4, 3])
def test_the_demo_learns_holds_equal_weights_and_draws_its_loss(tmp_path, processes):
    check_packages()
    out = tmp_path / "pictures" / "loss.png"
    result = subprocess.run(
        [sys.executable, "-m", "ferrorpc.cli.main", "demo", "-n", str(processes), "--epochs", "12", "--out", str(out)],
        capture_output=True, text=True, timeout=110, env=environment(), cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"^0: test accuracy ([0-9.]+)$", result.stdout, re.MULTILINE)[1]) >= 0.95
    assert f"\n0: identical weights on {processes} ranks\n" in result.stdout
    assert out.read_bytes().startswith(PNG_SIGNATURE)
    assert "training: 100%" in result.stderr


def test_ctrl_c_ends_the_demo_without_a_word_of_its_workers(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "ferrorpc.cli.main", "demo", "-n", "2", "--epochs", "100000", "--out", "loss.png"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    try:
        assert "training:" in process.stderr.readline()
    finally:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    words = [line for line in err.splitlines() if "training:" not in line]
    assert words == ["ferrorpc: stopped by SIGINT"], err
