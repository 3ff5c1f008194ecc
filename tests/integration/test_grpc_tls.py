"""With certificates, peers prove to each other that they are workers of the job, and strangers get nowhere."""

import dataclasses
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ferrorpc.errors import AuthenticationError
from ferrorpc.transports.grpc.server import METHOD, WorkerServer
from ferrorpc.v1 import transport_pb2
from ferrorpc.wire import options
from ferrorpc.wire.error_detail import restore
from ferrorpc.wire.frames import Key
from ferrorpc.wire.identity import Role
from ferrorpc.wire.limits import DATA_PROTOCOL_VERSION
from ferrorpc.wire.tls import Dialer
from tests.certificates import Issuer, variables
from tests.integration.coordinator_process import coordinator
from tests.integration.lane_ranks import SECONDS, Rank, assignment_of, random_bytes, send
from tests.integration.launching import environment
from tests.waiting import eventually

pytest.importorskip("cryptography")
KEY = Key(0, 0, 1)
JOB = "j"


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Issuer, Issuer]:
    directory = tmp_path_factory.mktemp("certificates")
    return Issuer(directory / "ours"), Issuer(directory / "theirs")


@pytest.fixture
def servers(authorities: tuple[Issuer, Issuer]) -> Iterator[list[WorkerServer]]:
    """Two ranks of our authority, and one of another."""
    ours, theirs = authorities
    files = [one.issue(Role.WORKER, JOB) for one in (ours, ours, theirs)]
    made = [WorkerServer("127.0.0.1", "127.0.0.1", tls=one) for one in files]
    yield made
    for server in made:
        server.close()


def test_ranks_with_certificates_of_one_authority_exchange_messages(servers: list[WorkerServer]) -> None:
    ranks = [Rank(rank, servers[rank]).enter(assignment_of(rank, servers[:2])) for rank in range(2)]
    boxes = [rank.box(KEY) for rank in ranks]
    for rank in ranks:
        send(rank, 1 - rank.rank, KEY, random_bytes(2 << 20))
    for box in boxes:
        eventually(
            lambda box=box: sum(len(frame.payload) for queue in box.frames.values() for frame in queue) == 2 << 20, "data"
        )
    assert [rank.lost for rank in ranks] == [[], []]


def test_a_rank_of_another_authority_reaches_nobody_and_is_reached_by_nobody(servers: list[WorkerServer]) -> None:
    ours = Rank(0, servers[0]).enter(assignment_of(0, [servers[0], servers[2]]), dial_seconds=1.0)
    theirs = Rank(1, servers[2]).enter(assignment_of(1, [servers[0], servers[2]]), dial_seconds=1.0)
    box = ours.box(KEY)
    for rank in (ours, theirs):
        send(rank, 1 - rank.rank, KEY, random_bytes(1))
    eventually(lambda: ours.lost and theirs.lost, "the refusals")
    assert box.frames == {}


@pytest.mark.parametrize(
    ("kinds", "complaints"),
    [
        (("ours", "plain"), ("does not speak TLS", "speaks TLS and this process does not")),
        (("ours", "theirs"), ("unable to get local issuer certificate", "unable to get local issuer certificate")),
    ],
)
def test_ranks_that_differ_in_tls_are_told_so_and_not_of_a_broken_link(
    authorities: tuple[Issuer, Issuer], kinds: tuple[str, str], complaints: tuple[str, str]
) -> None:
    files = {"plain": None, "ours": authorities[0].issue(Role.WORKER, JOB), "theirs": authorities[1].issue(Role.WORKER, JOB)}
    servers = [WorkerServer("127.0.0.1", "127.0.0.1", tls=files[kind]) for kind in kinds]
    ranks = [Rank(rank, servers[rank]).enter(assignment_of(rank, servers)) for rank in range(2)]
    for rank in ranks:
        send(rank, 1 - rank.rank, KEY, random_bytes(1))
    eventually(lambda: all(rank.failures or rank.lost for rank in ranks), "both are told")
    for server in servers:
        server.close()
    for rank, complaint in zip(ranks, complaints, strict=True):
        (failure,) = rank.failures
        assert isinstance(failure, AuthenticationError)
        assert servers[1 - rank.rank].address in failure.message
        assert complaint in failure.message


def test_a_connection_without_a_certificate_is_refused(servers: list[WorkerServer]) -> None:
    plain = grpc.insecure_channel(servers[0].address, options=options.data_channel())
    with plain as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(METHOD)(iter([b""]), timeout=SECONDS))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(("job", "role"), [("other", Role.WORKER), (JOB, Role.OBSERVER), (JOB, Role.ADMIN)])
def test_who_is_no_worker_of_the_job_is_refused_and_told_why(
    servers: list[WorkerServer], authorities: tuple[Issuer, Issuer], job: str, role: Role
) -> None:
    files = authorities[0].issue(role, job)
    opening = transport_pb2.Open(protocol_version=DATA_PROTOCOL_VERSION, job=JOB, source_rank=1, generation=1)
    message = transport_pb2.DataMessage(open=opening).SerializeToString()
    with Dialer(files).channel(servers[0].address, JOB, Role.WORKER, options.data_channel()) as channel:
        answers = list(channel.stream_stream(METHOD)(iter([message]), timeout=SECONDS))
    refused = restore(transport_pb2.ControlMessage.FromString(answers[0]).refused)
    assert isinstance(refused, AuthenticationError)
    assert f"{role} of job {job}" in refused.message


def test_a_rank_that_is_no_worker_of_the_job_is_not_dialled(authorities: tuple[Issuer, Issuer]) -> None:
    """A leaf of the same authority, on the address that a peer is thought to be at."""
    ours = authorities[0]
    imposter = WorkerServer("127.0.0.1", "127.0.0.1", tls=ours.issue(Role.WORKER, "other"))
    channel = Dialer(ours.issue(Role.WORKER, JOB)).channel(imposter.address, JOB, Role.WORKER, options.data_channel())
    with channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(METHOD)(iter([b""]), timeout=SECONDS))
    imposter.close()
    words = raised.value.details()
    assert "Hostname Verification" in words or "is not in peer certificate" in words, words


def test_a_job_runs_under_certificates_from_coordinator_to_tensors(authorities: tuple[Issuer, Issuer]) -> None:
    shown, brought = (variables(authorities[0].issue(role, JOB)) for role in (Role.COORDINATOR, Role.WORKER))
    with coordinator(environment=shown) as service:
        found = environment(**brought, FERRORPC_JOB=JOB, FERRORPC_COORDINATOR=service.address, FERRORPC_WORLD_SIZE="2")
        script = [
            sys.executable,
            "-c",
            "import ferrorpc\nwith ferrorpc.init_process_group() as g: print(g.all_reduce(g.rank + 1))",
        ]
        ranks = [subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=found) for _ in range(2)]
        assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == ["3", "3"]


def test_an_authority_is_replaced_while_ranks_run(tmp_path: Path) -> None:
    """A file with both authorities everywhere, then new certificates one by one, then the new authority alone."""
    old, new = Issuer(tmp_path / "old"), Issuer(tmp_path / "new")
    ranks = [old.issue(Role.WORKER, JOB, where=f"rank-{rank}") for rank in range(2)]
    files = [dataclasses.replace(one, authority=str(tmp_path / f"ca-{rank}.pem")) for rank, one in enumerate(ranks)]

    def trust(rank: int, *authorities: Issuer) -> None:
        fresh = tmp_path / "fresh.pem"
        fresh.write_text("".join((one.directory / "ca.pem").read_text() for one in authorities))
        fresh.replace(str(files[rank].authority))

    def renew(rank: int) -> None:
        fresh = new.issue(Role.WORKER, JOB, where=f"rank-{rank}")
        for name in ("key", "certificate"):
            os.replace(getattr(fresh, name), getattr(files[rank], name))

    for rank in range(2):
        trust(rank, old)
    servers = [WorkerServer("127.0.0.1", "127.0.0.1", tls=one) for one in files]
    steps = [
        *(lambda rank=rank: trust(rank, old, new) for rank in range(2)),
        *(lambda rank=rank: renew(rank) for rank in range(2)),
        *(lambda rank=rank: trust(rank, new) for rank in range(2)),
    ]
    try:
        for generation, step in enumerate(steps, 1):
            step()
            both = [Rank(rank, servers[rank]).enter(assignment_of(rank, servers, generation)) for rank in range(2)]
            boxes = [rank.box(KEY) for rank in both]
            for rank in both:
                send(rank, 1 - rank.rank, KEY, random_bytes(10))
            for rank, box in zip(both, boxes, strict=True):
                eventually(lambda rank=rank, box=box: rank.frames(KEY, 1 - rank.rank, 0, box), f"step {generation}")
            assert [rank.lost for rank in both] == [[], []]
        outdated = Dialer(old.issue(Role.WORKER, JOB))
        channel = outdated.channel(servers[0].address, JOB, Role.WORKER, options.data_channel())
        with channel, pytest.raises(grpc.RpcError):
            list(channel.stream_stream(METHOD)(iter([b""]), timeout=SECONDS))
    finally:
        for server in servers:
            server.close()


def test_streams_outlive_the_certificates_they_were_made_with_and_new_ones_are_refused_with_the_reason(tmp_path: Path) -> None:
    ours = Issuer(tmp_path / "ours")
    short = datetime.timedelta(seconds=6)
    files = [ours.issue(Role.WORKER, JOB, where=f"rank-{rank}", lifetime=short) for rank in range(2)]
    servers = [WorkerServer("127.0.0.1", "127.0.0.1", tls=one) for one in files]
    try:
        ranks = [Rank(rank, servers[rank]).enter(assignment_of(rank, servers)) for rank in range(2)]
        box = ranks[1].box(KEY)
        send(ranks[0], 1, KEY, random_bytes(10))
        eventually(lambda: ranks[1].frames(KEY, 0, 0, box), "a message")
        time.sleep(6.2)
        send(ranks[0], 1, KEY, random_bytes(20), slot=1)
        eventually(lambda: ranks[1].frames(KEY, 0, 1, box), "a message on the stream that is open")
        with pytest.raises(AuthenticationError, match="certificate has expired"):
            send(ranks[1], 0, KEY, random_bytes(10))
        ours.issue(Role.WORKER, JOB, where="rank-1")
        ranks[1].enter(assignment_of(1, servers), dial_seconds=1.0)
        send(ranks[1], 0, KEY, random_bytes(10))
        eventually(lambda: ranks[1].lost, "the end of dialling a server whose certificate has expired")
        assert "certificate has expired" in ranks[1].lost[0][1]
    finally:
        for server in servers:
            server.close()
