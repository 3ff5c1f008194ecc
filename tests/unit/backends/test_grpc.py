"""The backend between processes, here between threads."""

from __future__ import annotations

import uuid

import pytest

from ferrorpc.backends.grpc import GrpcBackend
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import GroupClosedError
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.shared_memory import host_peers
from tests.threads import in_threads

LAST = {
    "server": "",
    "memory": "ferrorpc.backends.grpc.ControlBlocks",
    "activity": "ferrorpc.coordination.activity.Activity.set_traffic_source",
}


@pytest.mark.parametrize("last", LAST)
def test_what_fails_after_host_peers_have_met_closes_their_sockets(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Else a peer would never see the end of a rank that goes on without a group."""
    made: list[host_peers.HostPeers] = []

    def keep(found: host_peers.HostPeers) -> None:
        made.append(found)

    monkeypatch.setattr(host_peers, "_all", type("Kept", (), {"add": staticmethod(keep), "__iter__": lambda _: iter(())})())
    world = LocalWorld(2, job=f"job-{uuid.uuid4()}")
    servers = [WorkerServer("127.0.0.1", "127.0.0.1") for _ in range(2)]
    if last == "server":
        for server in servers:
            server.close()
    else:
        monkeypatch.setattr(LAST[last], lambda *_: _raise(GroupClosedError("it ends here")))
    outcomes = in_threads(2, lambda rank: GrpcBackend(world.session(rank), servers[rank]))
    assert [type(outcome) for outcome in outcomes] == [GroupClosedError] * 2
    assert [link.socket.connection.fileno() for peers in made for link in peers.links.values()] == [-1, -1]
    for server in servers:
        server.close()


def _raise(error: Exception) -> None:
    raise error
