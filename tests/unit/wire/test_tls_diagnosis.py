"""What a connection that failed is told to come from, where that is TLS."""

import contextlib
import datetime
import socket
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from ferrorpc.errors import AuthenticationError
from ferrorpc.wire.identity import Role
from ferrorpc.wire.tls import TlsFiles
from ferrorpc.wire.tls_diagnosis import diagnose
from tests.certificates import Issuer

pytest.importorskip("cryptography")
GONE = datetime.timedelta(minutes=-1)
"""The lifetime of a certificate that has expired."""


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Issuer:
    return Issuer(tmp_path_factory.mktemp("certificates") / "ours")


@contextlib.contextmanager
def listening(files: TlsFiles) -> Iterator[int]:
    """The port of a gRPC server with these files."""
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", files.server_credentials())
        server.start()
        yield port
        server.stop(0).wait(5)


def said_of(address: str, files: TlsFiles) -> AuthenticationError:
    found = diagnose(address, files, "a", Role.COORDINATOR)
    assert isinstance(found, AuthenticationError)
    return found


def test_who_is_known_by_a_certificate_is_the_coordinator_of_the_job_or_named_as_another(ours: Issuer) -> None:
    worker = ours.issue(Role.WORKER, "a")
    with listening(ours.issue(Role.COORDINATOR, "a")) as port:
        assert diagnose(f"127.0.0.1:{port}", worker, "a", Role.COORDINATOR) is None
        assert diagnose(f"localhost:{port}", worker, "a", Role.COORDINATOR) is None
    with listening(ours.issue(Role.COORDINATOR, "b")) as port:
        found = said_of(f"127.0.0.1:{port}", worker)
    assert "is not the coordinator of job 'a'" in found.message
    assert "issued for this job" in found.hint


def test_who_let_its_certificate_expire_is_told_from_somebody_else(ours: Issuer) -> None:
    """Else whoever is on call looks for another process at that address."""
    old = ours.issue(Role.COORDINATOR, "a", lifetime=GONE, where="old")
    authority, certificate, key = (Path(str(file)).read_bytes() for file in (old.authority, old.certificate, old.key))
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)], authority, True))
        server.start()
        found = said_of(f"127.0.0.1:{port}", ours.issue(Role.WORKER, "a"))
        server.stop(0).wait(5)
    assert "certificate has expired" in found.message
    assert "is not the coordinator" not in found.message
    assert "ferrorpc certs issue DIRECTORY coordinator" in found.hint


def test_who_is_known_by_a_hosts_name_has_it_or_is_told_how_to_get_it(ours: Issuer) -> None:
    shown = ours.issue(Role.COORDINATOR, "a")
    files = TlsFiles(shown.authority)
    with listening(TlsFiles(None, shown.certificate, shown.key)) as port:
        assert diagnose(f"127.0.0.1:{port}", files, "a", Role.COORDINATOR) is None
        found = said_of(f"localhost:{port}", files)
    assert "ferrorpc certs issue DIRECTORY coordinator --host NAME" in found.hint


def test_who_hangs_up_after_the_handshake_did_not_accept_what_was_shown(ours: Issuer) -> None:
    files = ours.issue(Role.COORDINATOR, "a")
    context = files.server_context()

    def hang_up(listener: socket.socket) -> None:
        for _ in range(2):
            with contextlib.suppress(OSError), listener.accept()[0] as plain:
                context.wrap_socket(plain, server_side=True).close()

    for mine, words in ((files, "did not accept the certificate"), (TlsFiles(files.authority), "wants a certificate")):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=hang_up, args=(listener,))
            thread.start()
            assert words in said_of("127.0.0.1:{1}".format(*listener.getsockname()), mine).message
            thread.join(10)


def test_where_nobody_listens_tls_has_nothing_to_do_with_it(ours: Issuer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "127.0.0.1:{1}".format(*listener.getsockname())
    for files in (ours.issue(Role.WORKER, "a"), None):
        assert diagnose(address, files, "a", Role.COORDINATOR) is None


def test_who_does_not_speak_tls_is_named(ours: Issuer) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        found = said_of(f"127.0.0.1:{port}", ours.issue(Role.WORKER, "a"))
        server.stop(0).wait(5)
    assert "does not speak TLS" in found.message
