"""Processes of one host that share its memory, from joining to their end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ferrorpc.ddp.synchroniser import GradientSynchronizer
from ferrorpc.group import ProcessGroup
from ferrorpc.testing import run_groups
from ferrorpc.transports.shared_memory import discovery
from tests.integration.launching import run, write_script
from tests.integration.test_grpc_backend import GrpcWorld


def test_a_script_that_never_closes_says_goodbye_to_its_host_peers(tmp_path: Path) -> None:
    body = """
    import time
    import ferrorpc

    group = ferrorpc.init_process_group(transport="shared_memory")
    group.all_reduce(1.0)
    if group.rank == 0:
        assert float(group.recv(1)) == 5.0
        host_peers = group._backend.transport._near._host_peers
        deadline = time.monotonic() + 10
        while not host_peers.links[1].has_left and time.monotonic() < deadline:
            time.sleep(0.01)
        print(host_peers.links[1].has_left, host_peers.lost(), group._backend.latch.cause)
    else:
        group.send(5.0, 0)
    """
    result = run("-n", "2", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["0: True {} None"]


def test_what_a_script_sent_arrives_though_it_ends_before_a_host_peer_reads_it(tmp_path: Path) -> None:
    body = """
    import time
    import numpy as np
    import ferrorpc

    group = ferrorpc.init_process_group(transport="shared_memory", timeout=20.0)
    group.barrier()
    socket = group._backend.transport._near._links[1 - group.rank].socket
    if group.rank == 0:
        group.store.wait("deaf")
        sent = 0
        while not socket.pending:  # the last one is beyond what the kernel takes
            group.send(np.full(2500, sent, np.float32), 1)
            sent += 1
        group.store.set("sent", str(sent).encode())
    else:
        with socket.reading:
            group.store.set("deaf", b"")
            sent = int(group.store.get("sent"))
            time.sleep(1.0)
        print([int(group.recv(0)[0]) for _ in range(sent)] == list(range(sent)))
    """
    result = run("-n", "2", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["1: True"]


def test_the_way_is_chosen_for_each_pair_and_told(tmp_path: Path) -> None:
    """Rank 2 shares nothing: what goes to it goes over gRPC, and what the others send each other does not."""
    body = """
    import os
    import ferrorpc

    alone = os.environ["RANK"] == "2"
    with ferrorpc.init_process_group(transport="grpc" if alone else "auto") as group:
        assert group.all_reduce(group.rank + 1.0) == 6.0
        pair = group.subgroup([0, 1])
        if pair is not None:
            assert pair.all_reduce(1.0) == 2.0
        kinds = {peer: kind for peer, (kind, sent) in group._backend.transport.traffic().items() if sent}
        print(sorted(kinds.items()), pair is not None and pair._backend.arena is not None)
        group.barrier()
    """
    result = run("-n", "3", write_script(tmp_path, body))
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        "0: [(1, 'shared_memory'), (2, 'grpc')] True",
        "1: [(0, 'shared_memory'), (2, 'grpc')] True",
        "2: [(0, 'grpc'), (1, 'grpc')] False",
    ]


def test_gradients_need_not_fit_into_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ulimit -v` or `-f` there is little of it, and half of that stays free for operations."""
    monkeypatch.setattr(discovery, "default_bytes", lambda members: 32 << 20)
    with GrpcWorld(2, transport="shared_memory") as world:

        def body(group: ProcessGroup) -> bool:
            gradients = {f"weight{number}": np.full(3 << 19, group.rank, np.float32) for number in range(6)}
            synchronise = GradientSynchronizer(gradients, group, bucket_cap_mb=6)
            return all((mean == 0.5).all() for mean in synchronise(gradients).values())

        assert run_groups([ProcessGroup(backend, timeout=60.0) for backend in world.backends], body) == [True, True]
