"""Admission: protocol version, token, and stale or foreign resume tokens."""

from __future__ import annotations

import pytest
from ferrorpc_coordinator.state.access import Access, read_grants
from ferrorpc_coordinator.state.events import Received
from ferrorpc_coordinator.state.settings import SECOND, Limits, Settings

from ferrorpc.errors import ErrorCode
from ferrorpc.v1 import error_pb2, identity_pb2, session_pb2
from tests.transcripts.world import World
from tests.unit.coordinator_state.helpers import error, join


def refusal(world: World, name: str) -> error_pb2.ErrorDetail:
    assert world.clients[name].stream is None, "a refused stream is closed"
    return world.clients[name].events[-1].fenced


def test_another_protocol_version_is_refused_with_both_named() -> None:
    world = World(Settings(version="1.2"))
    world.hello("a", protocol_version=9)
    assert refusal(world, "a").code == ErrorCode.VERSION_MISMATCH
    assert "protocol 9" in refusal(world, "a").message
    assert "1.2" in refusal(world, "a").message


def test_who_waits_for_a_process_of_another_version_is_told_and_so_is_the_log() -> None:
    world = World()
    join(world, "a", size=2)
    world.hello("b", protocol_version=9)
    assert "; refused: 'b' speaks protocol 9 (ferrorpc" in world.coordinator.jobs["job"].rendezvous.waiting_reason()
    (note,) = [note for note in world.notes if note.kind == "refused"]
    assert note.text.startswith("member 'b' was refused: 'b' speaks protocol 9")
    world.tick(60 * SECOND)
    assert "Refused: 'b' speaks protocol 9" in error(world, "a").message


def test_a_hello_without_the_token_is_refused() -> None:
    world = World(access=Access(read_grants("the-secret-of-all")))
    world.hello("a")
    assert refusal(world, "a").code == ErrorCode.AUTHENTICATION
    world.hello("b", token="the-secret-of-all")
    assert world.clients["b"].token
    status = world.replies[world.call(session_pb2.StatusRequest(job="job", token="guess"))]
    assert isinstance(status, error_pb2.ErrorDetail)
    assert status.code == ErrorCode.AUTHENTICATION


@pytest.mark.parametrize("field", ["host", "address"])
def test_a_host_that_could_control_a_terminal_is_refused(field: str) -> None:
    """The errors and the status that others show contain it."""
    world = World()
    world.hello("a", **{field: "node\x1b[2J"})
    assert refusal(world, "a").code == ErrorCode.CONFIG
    assert rf"the {field} of member a is 'node\x1b[2J'" in refusal(world, "a").message


def test_what_others_are_told_of_a_member_is_printable() -> None:
    world = World()
    join(world, "a", "b")
    beat = session_pb2.Beat(step=1, generation=1, activity="all_reduce\x1b[2J")
    world.step(Received(world.clients["b"].stream or 0, session_pb2.ClientFrame(beat=beat)))
    world.ask("b", leave={"reason": "boom\x1b[2J\nall is well"})
    members = world.coordinator.jobs["job"].status().members
    (told,) = [member for member in members if member.name == "b"]
    assert (told.activity, told.reason) == (r"all_reduce\x1b[2J", r"boom\x1b[2J\nall is well")


def test_a_token_of_another_cluster_is_fenced() -> None:
    world = World()
    join(world, "a")
    world.rows.clear()
    world.restart()
    world.hello("a", resume=True)
    assert refusal(world, "a").code == ErrorCode.STALE_GENERATION


def test_the_token_of_a_member_whose_name_was_taken_over_is_fenced() -> None:
    world = World()
    join(world, "a")
    old = world.clients["a"]
    world.cut("a")
    world.hello("a", instance="2")
    new = world.clients["a"]
    world.clients["a"] = old
    world.hello("a", resume=True)
    assert refusal(world, "a").code == ErrorCode.STALE_GENERATION
    assert new.stream is not None


def test_the_token_of_a_second_hello_survives_a_restart() -> None:
    """Its process, whose first Welcome was lost, would be fenced."""
    world = World()
    first = world.hello("a").token
    world.hello("a")
    assert world.clients["a"].token != first
    world.restart()
    world.hello("a", resume=True)
    assert world.clients["a"].stream is not None


def test_who_was_at_another_cluster_since_does_not_get_its_place_in_the_old_generation_again() -> None:
    """As after a coordinator ran on other data for a while. It would wait there alone, among barriers that are over."""
    world = World()
    join(world, "a", "b")
    world.restart()
    world.hello("a")
    join(world, "a", size=2)
    assert world.clients["a"].generation == 0
    world.hello("b")
    join(world, "b", size=2)
    assert [(world.clients[name].generation, world.clients[name].rank) for name in "ab"] == [(2, 0), (2, 1)]
    newest = world.coordinator.jobs["job"].generations.newest
    assert "its process forgot this session" in newest.reason


def test_after_a_restart_a_member_has_its_own_lease_to_come_back_if_that_is_longer() -> None:
    world = World()
    world.hello("a", lease_ms=30_000)
    world.restart()
    world.tick(29 * SECOND)
    world.hello("a", resume=True)
    assert world.clients["a"].stream is not None


def test_a_member_whose_name_had_left_before_is_not_forgotten_with_those_who_left() -> None:
    world = World(Settings(limits=Limits(gone_members=1)))
    join(world, "a")
    world.ask("a", leave={})
    world.hello("a", instance="2")
    for name in ("b", "c"):
        join(world, name)
        world.ask(name, leave={})
    members = world.coordinator.jobs["job"].members
    assert [member.name for member in members] == ["a", "c"]


def test_tokens_are_not_in_the_journal() -> None:
    world = World()
    join(world, "a")
    token = world.clients["a"].token.encode()
    assert all(token not in value for value in world.rows.values())


def test_a_lease_is_kept_within_bounds() -> None:
    world = World()
    for name, asked, given, beats in (
        ("a", 0, 3_000, 500),
        ("b", 1, 200, 50),
        ("c", 10_000_000, 300_000, 500),
        ("d", 1_000, 1_000, 250),
    ):
        world.take()
        world.hello(name, lease_ms=asked)
        welcome = world.take()[0][1].welcome
        assert (welcome.lease_ms, welcome.heartbeat_interval_ms) == (given, beats)


def test_a_job_is_a_namespace() -> None:
    world = World()
    join(world, "a")
    world.job = "other"
    world.hello("b")
    assert set(world.coordinator.jobs) == {"job", "other"}
    status = world.replies[world.call(session_pb2.StatusRequest(job="other"))]
    assert isinstance(status, session_pb2.StatusResponse)
    assert [member.name for member in status.members] == ["b"]
    assert status.position.generation == 0


def test_status_of_a_job_that_does_not_exist_names_those_that_do() -> None:
    world = World()
    join(world, "a")
    reply = world.replies[world.call(session_pb2.StatusRequest(job="typo"))]
    assert isinstance(reply, error_pb2.ErrorDetail)
    assert "job" in reply.hint


def test_peers_receive_the_host_address_and_labels_of_a_member() -> None:
    world = World()
    world.hello("a", labels=[identity_pb2.Label(name="gpu", value="7")], address="h:1")
    join(world, "a", "b")
    peers = world.clients["b"].results[world.clients["b"].sequence].join.peers
    assert [(peer.name, peer.address, [(label.name, label.value) for label in peer.labels]) for peer in peers] == [
        ("a", "h:1", [("gpu", "7")]),
        ("b", "b:7000", []),
    ]


def test_peers_dial_a_member_that_resumed_from_another_address_there_from_the_next_generation_on() -> None:
    """As a container whose network restarted, or a host with a new lease of DHCP."""
    world = World()
    join(world, "a", "b")
    world.cut("a")
    world.hello("a", resume=True, address="moved:1")
    world.restart()
    world.hello("a", resume=True, address="moved:1")
    world.hello("b", resume=True)
    join(world, "a", "b")
    peers = world.clients["b"].results[world.clients["b"].sequence].join.peers
    assert (world.clients["b"].generation, [peer.address for peer in peers]) == (2, ["moved:1", "b:7000"])


def test_who_waits_for_a_name_does_not_get_it_because_the_coordinator_restarts() -> None:
    """Its holder lives, and resumes its session in a moment."""
    world = World()
    join(world, "a", "b")
    holder = world.clients["b"]
    for _ in range(2):
        world.hello("b", instance="another")
        refused = world.clients.pop("b").events[-1].fenced
        assert (refused.code, refused.retryable) == (ErrorCode.CONFIG, True)
        world.clients["b"] = holder
        world.restart()
    assert "that has not come back since the coordinator restarted" in refused.message
    world.hello("a", resume=True)
    world.hello("b", resume=True)
    world.tick(20 * SECOND)
    assert not any(event.HasField("broken") for event in [*world.clients["a"].events, *holder.events])
    world.restart()
    world.hello("a", resume=True)
    world.tick(10 * SECOND)
    assert world.hello("b", instance="another").token, "the holder is dead"


def test_a_new_process_under_the_name_of_one_that_has_left_breaks_no_generation() -> None:
    world = World()
    join(world, "a", "b", "c")
    world.ask("a", leave={})
    world.hello("a", instance="2")
    assert not [event for event in world.clients["b"].events if event.HasField("broken")]
    assert not world.coordinator.jobs["job"].generations.newest.over
