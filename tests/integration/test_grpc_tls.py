"""With certificates, peers prove to each other that they belong to the job, and strangers get nowhere."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from ferrorpc.guard import SYSTEM_CLOCK
from ferrorpc.transports.grpc_lane import METHOD
from ferrorpc.transports.grpc_server import WorkerServer
from ferrorpc.transports.grpc_tls import Tls
from ferrorpc.wire import options
from ferrorpc.wire.frames import Key
from tests.integration.test_grpc_lane import SECONDS, Rank, assignment_of, random_bytes, send, wait_for

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl")

KEY = Key(0, 0, 1)
NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]


def openssl(*words: str, cwd: Path) -> None:
    subprocess.run(["openssl", *words], cwd=cwd, check=True, capture_output=True)


class Authority:
    """A certificate authority in a directory."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        openssl("req", "-x509", *NEW_KEY, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=job", cwd=directory)
        (directory / "names").write_text("subjectAltName=IP:127.0.0.1\n")

    def issue(self) -> Tls:
        """A new certificate for 127.0.0.1."""
        where = self._directory
        openssl("req", *NEW_KEY, "-keyout", "rank.key", "-out", "rank.csr", "-subj", "/CN=rank", cwd=where)
        signing = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names", "-days", "1"]
        openssl("x509", "-req", "-in", "rank.csr", "-out", "rank.pem", *signing, cwd=where)
        authority, certificate, key = ((where / name).read_bytes() for name in ("ca.pem", "rank.pem", "rank.key"))
        return Tls(authority, certificate, key)


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    directory = tmp_path_factory.mktemp("certificates")
    return Authority(directory / "ours"), Authority(directory / "theirs")


@pytest.fixture
def servers(authorities: tuple[Authority, Authority]) -> Iterator[list[WorkerServer]]:
    """Two ranks of our authority, and one of another."""
    ours, theirs = authorities
    made = [WorkerServer("127.0.0.1", "127.0.0.1", SYSTEM_CLOCK, tls=one.issue()) for one in (ours, ours, theirs)]
    yield made
    for server in made:
        server.close()


def test_ranks_with_certificates_of_one_authority_exchange_messages(servers: list[WorkerServer]) -> None:
    ranks = [Rank(rank, servers[rank]).enter(assignment_of(rank, servers[:2])) for rank in range(2)]
    boxes = [rank.box(KEY) for rank in ranks]
    for rank in ranks:
        send(rank, 1 - rank.rank, KEY, random_bytes(2 << 20))
    for box in boxes:
        wait_for(lambda box=box: sum(len(frame.payload) for queue in box.frames.values() for frame in queue) == 2 << 20, "data")
    assert [rank.lost for rank in ranks] == [[], []]


def test_a_rank_of_another_authority_reaches_nobody_and_is_reached_by_nobody(servers: list[WorkerServer]) -> None:
    ours = Rank(0, servers[0]).enter(assignment_of(0, [servers[0], servers[2]]), dial_seconds=1.0)
    theirs = Rank(1, servers[2]).enter(assignment_of(1, [servers[0], servers[2]]), dial_seconds=1.0)
    box = ours.box(KEY)
    for rank in (ours, theirs):
        send(rank, 1 - rank.rank, KEY, random_bytes(1))
    wait_for(lambda: ours.lost and theirs.lost, "the refusals")
    assert box.frames == {}


def test_a_connection_without_a_certificate_is_refused(servers: list[WorkerServer]) -> None:
    plain = grpc.insecure_channel(servers[0].address, options=options.data_channel())
    with plain as channel, pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(METHOD)(iter([b""]), timeout=SECONDS))
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_the_key_is_in_no_repr(authorities: tuple[Authority, Authority]) -> None:
    assert "PRIVATE" not in repr(authorities[0].issue())


def test_a_job_runs_under_certificates_from_coordinator_to_tensors(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "job").issue()
    files = {"CA": tls.authority, "CERT": tls.certificate, "KEY": tls.key}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    flags = [word for name in files for word in (f"--tls-{name.lower()}", str(tmp_path / name))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FERRORPC_")}
    command = [sys.executable, "-m", "ferrorpc_coordinator", "--listen", "127.0.0.1:0", *flags]
    coordinator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        environment |= {f"FERRORPC_TLS_{name}": str(tmp_path / name) for name in files}
        environment |= {"FERRORPC_COORDINATOR": coordinator.stdout.readline().split()[1], "FERRORPC_WORLD_SIZE": "2"}
        script = [
            sys.executable,
            "-c",
            "import ferrorpc\nwith ferrorpc.init_process_group() as g: print(g.all_reduce(g.rank + 1))",
        ]
        ranks = [subprocess.Popen(script, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
        assert [rank.communicate(timeout=60)[0].strip() for rank in ranks] == ["3", "3"]
    finally:
        coordinator.terminate()
        coordinator.communicate(timeout=20)
