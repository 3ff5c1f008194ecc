"""The shaped link: its floor, its namespaces, and that they never stay."""

import os
import shutil
import subprocess
import sys

import pytest

from benchmarks import link

NAMESPACES = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="network namespaces need root and iproute2"
)


def namespaces():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines() if line.startswith(link.PREFIX)]


def test_the_floor_is_frames_over_rate():
    frames = 1448 * 100_000
    expected = (100_000 * 1514 - link.BURST_BYTES) * 8 / 1e9
    assert link.floor_seconds(frames, 1000) == pytest.approx(expected)
    assert link.floor_seconds(frames, 100) == pytest.approx(10 * expected)


@pytest.mark.root
@NAMESPACES
def test_two_hosts_reach_each_other_at_the_rate_that_was_asked_for():
    with link.link(100) as hosts:
        assert len(namespaces()) == 2
        shaped = subprocess.run(
            [*hosts[0].prefix, "tc", "qdisc", "show", "dev", hosts[0].interface], capture_output=True, text=True, check=True
        )
        assert "tbf" in shaped.stdout
        assert "rate 100Mbit" in shaped.stdout
        knock = f"import socket; socket.create_connection(({hosts[1].address!r}, 9), 5)"
        answer = subprocess.run([*hosts[0].prefix, sys.executable, "-c", knock], capture_output=True, text=True)
        assert "ConnectionRefusedError" in answer.stderr  # nobody listens there, but somebody is there
    assert namespaces() == []


@pytest.mark.root
@NAMESPACES
def test_the_namespaces_go_with_an_error_and_those_of_a_killed_run_with_the_next():
    with pytest.raises(RuntimeError, match="in the middle"), link.link(1000):
        raise RuntimeError("in the middle")
    assert namespaces() == []
    gone = subprocess.Popen(["true"])
    gone.wait()
    subprocess.run(["ip", "netns", "add", f"{link.PREFIX}{gone.pid}-a"], check=True)
    with link.link(1000):
        assert len(namespaces()) == 2
    assert namespaces() == []
