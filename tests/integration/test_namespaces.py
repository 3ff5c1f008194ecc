"""Workers in two network namespaces find each other by advertised addresses, although both listen on 0.0.0.0."""

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.lane_processes import PeerHandle, peers
from tests.integration.launching import environment, write_script

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="network namespaces need iproute2"),
]

HOSTS = ("10.213.7.1", "10.213.7.2")
HOSTS_IPV6 = ("fd00:213::1", "fd00:213::2")
NAMES = (f"ferrorpc-a-{os.getpid()}", f"ferrorpc-b-{os.getpid()}")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts joined by one cable."""
    try:
        ip("netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine gives no network namespaces: {error.stderr.strip()}")
    try:
        ip("netns", "add", NAMES[1])
        ip("link", "add", "veth0", "netns", NAMES[0], "type", "veth", "peer", "name", "veth0", "netns", NAMES[1])
        for name, host in zip(NAMES, HOSTS, strict=True):
            ip("-n", name, "address", "add", f"{host}/24", "dev", "veth0")
            ip("-n", name, "link", "set", "veth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        for name, host in zip(NAMES, HOSTS_IPV6, strict=True):
            ip("-n", name, "address", "add", f"{host}/64", "dev", "veth0", "nodad")
        yield NAMES
    finally:
        for name in NAMES:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def in_namespace(rank: int, name: str, host: str) -> PeerHandle:
    return PeerHandle(rank, prefix=["ip", "netns", "exec", name], hosts=["0.0.0.0", host])


def test_workers_in_two_namespaces_exchange_messages(namespaces: tuple[str, str]) -> None:
    ranks = [in_namespace(rank, namespaces[rank], HOSTS[rank]) for rank in range(2)]
    with peers(*ranks) as (first, second):
        assert [rank.address.rpartition(":")[0] for rank in ranks] == list(HOSTS)
        for size in (9, 5 << 20):
            first.do(f"send 1 {size}")
            second.hear(f"got {size} from 0")
            second.do(f"send 0 {size}")
            first.hear(f"got {size} from 1")


def test_a_cut_cable_is_told_on_both_sides_soon(namespaces: tuple[str, str]) -> None:
    ranks = [in_namespace(rank, namespaces[rank], HOSTS[rank]) for rank in range(2)]
    with peers(*ranks) as (first, second):
        first.do("send 1 9")
        second.hear("got 9 from 0")
        ip("-n", namespaces[0], "link", "set", "veth0", "down")
        first.hear("lost 1", seconds=15.0)
        second.hear("lost 0", seconds=15.0)


def test_a_world_that_is_reached_by_ipv6(namespaces: tuple[str, str]) -> None:
    """As under torchrun: rank 0 starts the coordinator, and nobody names an IPv4 address."""
    script = (
        "import ferrorpc, numpy\n"
        "with ferrorpc.init_process_group(timeout=30) as group:\n"
        "    print(group.all_reduce(numpy.arange(3) + group.rank).tolist())"
    )
    place = {"MASTER_ADDR": HOSTS_IPV6[0], "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
    settings = {"FERRORPC_BIND": "::", "FERRORPC_INSECURE": "1", "FERRORPC_TRANSPORT": "grpc"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", script],
            env={**environment(), **place, **settings, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(namespaces)
    ]
    assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["[1, 3, 5]\n"] * 2


COUNTING = """
    import os, sys, time
    import numpy as np
    import ferrorpc

    with ferrorpc.init_process_group(timeout=30) as group:
        print("began", flush=True)
        while not int(group.all_reduce(np.array([int(os.path.exists(sys.argv[1]))]), op="max")[0]):
            time.sleep(0.01)
        group.store.set(f"end/{group.rank}", b"here")
        group.store.wait(f"end/{1 - group.rank}", timeout=30)
        print("ends in generation", group.generation)
"""


@pytest.mark.slow
def test_nobody_notices_that_the_coordinators_cable_was_cut(namespaces: tuple[str, str], tmp_path: Path) -> None:
    """For longer than a lease and a keepalive: it hears of nobody, while the members work."""
    script, end = write_script(tmp_path, COUNTING), tmp_path / "end"
    address = f"{HOSTS[0]}:29700"
    settings = {**environment(), "FERRORPC_INSECURE": "1", "FERRORPC_COORDINATOR": address, "FERRORPC_WORLD_SIZE": "2"}
    here, there = (["ip", "netns", "exec", name, sys.executable] for name in namespaces)
    service = subprocess.Popen(
        [*here, "-m", "ferrorpc", "coordinator", "--listen", address],
        env=settings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    settings |= {"FERRORPC_BIND": "0.0.0.0"}
    command = [*there, script, str(end)]
    ranks = [subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)]
    try:
        assert [rank.stdout.readline() for rank in ranks if rank.stdout] == ["began\n"] * 2
        ip("-n", namespaces[0], "link", "set", "veth0", "down")
        time.sleep(7)
        ip("-n", namespaces[0], "link", "set", "veth0", "up")
        end.touch()
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["ends in generation 1\n"] * 2
    finally:
        for process in (*ranks, service):
            process.terminate()
        log = service.communicate(timeout=30)[1]
    assert "nobody is heard of: the coordinator may be cut off" in log


def test_a_launcher_where_the_loopback_interface_is_down_says_so_at_once(tmp_path: Path) -> None:
    """An address of an interface that is down can be bound all the same."""
    if subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no network namespaces")
    script = write_script(tmp_path, "import ferrorpc\nferrorpc.init_process_group()")
    result = subprocess.run(
        ["unshare", "--net", sys.executable, "-m", "ferrorpc", "run", "-n", "2", script],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 64
    assert f"127.0.0.1: {os.strerror(errno.ENETUNREACH)}\ntry: bring the loopback interface up" in result.stderr
