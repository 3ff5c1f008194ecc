"""The gRPC lane between processes: how each way of ending looks to the peer, and that nothing hangs."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.integration.lane_processes import PeerHandle, peers

MIB = 1 << 20


def both_ways(first: PeerHandle, second: PeerHandle, size: int = 9) -> None:
    for sender, receiver in ((first, second), (second, first)):
        sender.do(f"send {receiver.rank} {size}")
        receiver.hear(f"got {size} from {sender.rank}")


def test_messages_of_every_size_cross_between_processes() -> None:
    with peers(PeerHandle(0), PeerHandle(1)) as (first, second):
        for size in (1, 1000, MIB, 20 * MIB + 1):
            both_ways(first, second, size)


def test_a_killed_peer_is_told_once_and_at_once() -> None:
    with peers(PeerHandle(0), PeerHandle(1)) as (first, second):
        both_ways(first, second)
        second.process.kill()
        assert first.hear("lost 1", seconds=10.0)
        assert first.silent(0.5)


def test_a_killed_peer_that_only_received_is_told() -> None:
    with peers(PeerHandle(0), PeerHandle(1)) as (first, second):
        first.do("send 1 9")
        second.hear("got 9")
        second.process.kill()
        assert first.hear("lost 1", seconds=10.0)


def test_a_peer_that_holds_its_interpreter_is_not_lost() -> None:
    with peers(PeerHandle(0), PeerHandle(1)) as (first, second):
        both_ways(first, second)
        second.tell("hold 4")
        assert first.silent(5.0), "longer than keepalives are waited for"
        second.hear("done hold", seconds=30.0)
        both_ways(first, second)


def test_a_peer_that_closes_and_ends_fails_nobody_until_it_is_needed() -> None:
    with peers(PeerHandle(0), PeerHandle(1)) as (first, second):
        both_ways(first, second)
        second.tell(f"send 0 {3 * MIB}")
        second.tell("close")
        second.tell("return")
        first.hear(f"got {3 * MIB}")
        assert second.wait(60.0) == 0
        assert first.silent(0.5)
        # A first question may meet what the peer sent last, still on its way; whoever needs the peer goes on asking.
        said = ""
        for _ in range(20):
            first.tell("probe 1")
            said = first.hear("")
            if said != "done probe":
                break
            time.sleep(0.1)
        assert said == "lost 1"  # with no reason but its goodbye


@pytest.mark.parametrize(("word", "code"), [("return", 0), ("raise", 1)])
def test_a_script_that_never_closes_ends_soon_and_says_goodbye(word: str, code: int, tmp_path: Path) -> None:
    with (tmp_path / "stderr").open("w+") as stderr, peers(PeerHandle(0), PeerHandle(1, stderr=stderr)) as (first, second):
        both_ways(first, second)
        began = time.monotonic()
        second.tell(word)
        assert second.wait(60.0) == code
        assert time.monotonic() - began < 10.0
        assert first.silent(0.5)
        stderr.seek(0)
        said = stderr.read()
    assert said == "" if word == "return" else said.count("Traceback") == 1


def test_a_script_ends_soon_although_its_peer_is_stopped(tmp_path: Path) -> None:
    """As soon as the coordinator says so."""
    with (tmp_path / "stderr").open("w+") as stderr, peers(PeerHandle(0), PeerHandle(1, stderr=stderr)) as (first, second):
        both_ways(first, second)
        first.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        second.do("stalled 0")
        second.tell("return")
        assert second.wait(60.0) == 0
        assert time.monotonic() - began < 10.0
        stderr.seek(0)
        assert "before rank 0 has confirmed that all it sent arrived" in stderr.read()


def test_what_a_script_sent_arrives_though_it_ends_at_once_and_the_link_is_slow() -> None:
    with peers(PeerHandle(0), PeerHandle(1), bytes_per_second=2 * MIB) as (first, second):
        second.do(f"send 0 {3 * MIB}")
        second.tell("return")
        first.hear(f"got {3 * MIB} from 1")
        assert second.wait(60.0) == 0


def test_both_sides_may_close_at_the_same_time() -> None:
    with peers(PeerHandle(0), PeerHandle(1)) as (first, second):
        both_ways(first, second)
        for peer in (first, second):
            peer.tell("close")
        for peer in (first, second):
            peer.hear("done close")
            peer.tell("return")
            assert peer.wait(60.0) == 0


def test_a_forked_child_says_no_goodbye_for_its_parent() -> None:
    environment = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0"}
    with peers(PeerHandle(0), PeerHandle(1, environment=environment)) as (first, second):
        both_ways(first, second)
        second.do("fork")
        both_ways(first, second)
        assert first.silent(0.2)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
def test_a_proxy_variable_does_not_divert_the_data_plane(variable: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment[variable] = "http://127.0.0.1:9"
    with peers(PeerHandle(0, environment=environment), PeerHandle(1, environment=environment)) as (first, second):
        both_ways(first, second)
