"""Certificates that are renewed while a process runs: taken over once they are sound together, and not before."""

import contextlib
import datetime
import errno
import os
import shutil
import ssl
import subprocess
import sys
import time
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from ferrorpc.errors import AuthenticationError, ConfigError
from ferrorpc.wire import options, tls
from ferrorpc.wire.identity import Identity, Role
from ferrorpc.wire.tls import Dialer, TlsFiles
from ferrorpc.wire.tls_diagnosis import diagnose
from tests.certificates import DAY, Issuer

pytest.importorskip("cryptography")


@pytest.fixture
def ours(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path / "ours")


def kept(files: TlsFiles, *, listening: bool) -> "tls._Reloaded[bytes]":
    """What is made of them is simply the certificate's bytes."""
    assert files.certificate is not None
    return tls._Reloaded(files, Path(files.certificate).read_bytes, listening=listening)


def move(source: str | None, target: str | None) -> None:
    assert source is not None
    assert target is not None
    shutil.copyfile(source, target)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "ferrorpc.tls"]


@pytest.mark.parametrize("listening", [True, False])
def test_when_a_certificate_ends_is_read_out_of_it(ours: Issuer, listening: bool) -> None:
    files = ours.issue(Role.COORDINATOR, "a", lifetime=2 * DAY)
    end = files.ends_at(listening=listening)
    assert end is not None
    assert abs(end - time.time() - 2 * 86400) < 600
    assert TlsFiles(None, files.certificate, files.key).ends_at(listening=listening) is None, "nobody to judge it by"
    assert TlsFiles(files.authority).ends_at(listening=listening) is None
    with pytest.raises(AuthenticationError, match="expired"):
        ours.issue(Role.COORDINATOR, "a", lifetime=-DAY / 1000, where="old").ends_at(listening=listening)


@pytest.mark.parametrize("listening", [True, False])
def test_a_rotation_that_is_half_done_changes_nothing_and_is_told_once(
    ours: Issuer, caplog: pytest.LogCaptureFixture, listening: bool
) -> None:
    files, fresh = (ours.issue(Role.WORKER, "a", where=where) for where in ("used", "fresh"))
    mine = kept(files, listening=listening)
    before = mine.made
    move(fresh.certificate, files.certificate)
    assert [mine.current() for _ in range(5)] == [before] * 5
    (line,) = said(caplog)
    assert "is kept, the files do not fit (yet)" in line
    move(fresh.key, files.key)
    assert mine.current() == Path(str(fresh.certificate)).read_bytes() != before
    assert mine.current() == mine.made
    assert [line.endswith("was read anew") for line in said(caplog)] == [False, True]


def test_a_file_that_is_gone_for_a_moment_changes_nothing(ours: Issuer, caplog: pytest.LogCaptureFixture) -> None:
    files = ours.issue(Role.WORKER, "a")
    mine, key = kept(files, listening=False), Path(str(files.key))
    content = key.read_bytes()
    key.unlink()
    assert [mine.current() for _ in range(3)] == [mine.made] * 3
    key.write_bytes(content)
    assert mine.current() == mine.made
    assert ["cannot read" in line for line in said(caplog)] == [True, False]


def test_files_that_come_back_as_they_were_and_go_again_are_told_of_again(
    ours: Issuer, caplog: pytest.LogCaptureFixture
) -> None:
    files = ours.issue(Role.WORKER, "a")
    mine, key = kept(files, listening=False), Path(str(files.key))
    for _ in range(2):
        key.rename(ours.directory / "away")
        assert [mine.current() for _ in range(3)] == [mine.made] * 3
        (ours.directory / "away").rename(key)
        assert mine.current() == mine.made
    assert ["cannot read" in line for line in said(caplog)] == [True, True]


def test_a_certificate_that_cannot_be_written_leaves_nothing_beside_the_old_one(
    ours: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A timer renews it, and each failure would leave a key."""
    files = ours.issue(Role.WORKER, "a", where="used")
    directory = Path(str(files.key)).parent
    before = {path: path.read_bytes() for path in directory.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            ours.issue(Role.WORKER, "a", where="used")
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_key_with_a_password_is_refused_and_nobody_asked_for_it(ours: Issuer) -> None:
    """OpenSSL would ask at the terminal, or wait on stdin where there is none."""
    from cryptography.hazmat.primitives import serialization

    files = ours.issue(Role.COORDINATOR, "a", where="locked")
    path = Path(str(files.key))
    key = serialization.load_pem_private_key(path.read_bytes(), None)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(*form, serialization.BestAvailableEncryption(b"secret")))
    code = "import sys; from ferrorpc.wire.tls import TlsFiles; TlsFiles(*sys.argv[1:]).check(listening=True)"
    command = [sys.executable, "-c", code, str(files.authority), str(files.certificate), str(files.key)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, start_new_session=True, **pipes) as asked:
        try:
            assert asked.wait(30) == 1  # nothing is written to its stdin, and it stays open
            said = asked.stderr.read().decode()
            assert f"{path} has a password" in said
            assert f"try: write it without one: openssl pkey -in {path}" in said
        finally:
            asked.kill()


@pytest.mark.parametrize("swapped", [False, True])
def test_a_file_that_is_no_pem_is_named(ours: Issuer, swapped: bool) -> None:
    """OpenSSL says no more than "PEM lib"."""
    import cryptography.x509
    from cryptography.hazmat.primitives.serialization import Encoding

    files = ours.issue(Role.WORKER, "a", where=f"der-{swapped}")
    path = Path(str(files.certificate))
    if not swapped:
        path.write_bytes(cryptography.x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER))
    wrong = TlsFiles(files.authority, *((files.key, files.certificate) if swapped else (files.certificate, files.key)))
    with pytest.raises(ConfigError, match=f"{wrong.certificate} holds no certificate in PEM"):
        wrong.check(listening=True)


@pytest.mark.parametrize("role", [Role.OBSERVER, Role.ADMIN])
def test_who_would_listen_with_the_certificate_of_one_who_may_not_is_told_that_its_role_is_wrong(
    ours: Issuer, role: Role
) -> None:
    """To renew it would change nothing."""
    with pytest.raises(AuthenticationError) as raised:
        ours.issue(role, "a").check(listening=True)
    assert "renew" not in raised.value.hint
    assert "worker.pem or coordinator.pem" in raised.value.hint


def test_a_certificate_of_another_authority_is_told_what_its_file_may_lack(ours: Issuer, tmp_path: Path) -> None:
    """Where an authority of one's own issues through an intermediate one, to renew changes nothing."""
    files = Issuer(tmp_path / "theirs").issue(Role.WORKER, "a")
    with pytest.raises(AuthenticationError) as raised:
        TlsFiles(str(ours.directory / "ca.pem"), files.certificate, files.key).check(listening=False)
    assert "intermediate" in raised.value.hint


def test_an_intermediate_authority_will_do_without_the_one_above_it(tmp_path: Path) -> None:
    """As cert-manager may give it out; gRPC's own check accepts it, at both ends."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    from ferrorpc.cli import authority

    above, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    builder = authority._builder(authority._name("between"), authority._name("above"), key, 2 * DAY, signs=True)
    authority._write(tmp_path, "ca", builder.sign(above, hashes.SHA256()), key)
    for role in (Role.COORDINATOR, Role.WORKER):
        authority.Authority.read(tmp_path).issue(role, [Identity("a", role)], [], DAY, tmp_path)
    server, client = (
        TlsFiles(*(str(tmp_path / name) for name in ("ca.pem", f"{role}.pem", f"{role}.key")))
        for role in (Role.COORDINATOR, Role.WORKER)
    )
    with futures.ThreadPoolExecutor(1) as pool:
        served = grpc.server(pool)
        port = served.add_secure_port("127.0.0.1:0", server.server_credentials())
        served.start()
        with Dialer(client).channel(f"127.0.0.1:{port}", "a", Role.COORDINATOR, options.session_channel()) as channel:
            grpc.channel_ready_future(channel).result(timeout=20)
        assert diagnose(f"127.0.0.1:{port}", client, "a", Role.COORDINATOR) is None
        served.stop(0).wait(5)


@pytest.mark.parametrize("listening", [True, False])
@pytest.mark.parametrize("kind", ["Ed25519", "P-521", "P-384"])
def test_a_kind_of_key_that_grpc_does_not_take_is_refused(
    ours: Issuer, kind: str, listening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenSSL takes it, but no peer could connect."""
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    keys = {
        "Ed25519": ed25519.Ed25519PrivateKey.generate(),
        "P-521": ec.generate_private_key(ec.SECP521R1()),
        "P-384": ec.generate_private_key(ec.SECP384R1()),
    }
    monkeypatch.setattr(ec, "generate_private_key", lambda _curve: keys[kind])
    files = ours.issue(Role.WORKER, "a")
    if kind == "P-384":
        assert files.check(listening=listening)
    else:
        with pytest.raises(
            ConfigError, match=f"{files.certificate} is of a kind that gRPC does not take: {kind}\ntry: .*P-256"
        ):
            files.check(listening=listening)


@pytest.mark.parametrize("given", ["tls_cert", "tls_key"])
def test_half_of_a_pair_is_not_taken_for_none(given: str) -> None:
    """Or who forgets a certificate would speak in the clear."""
    with pytest.raises(ConfigError, match="only one of them is given"):
        TlsFiles.of({"tls_ca": None, "tls_cert": None, "tls_key": None, given: "file.pem"})


def test_nobody_dials_without_an_authority_to_check_the_other_end_by(ours: Issuer) -> None:
    """gRPC would take any of the authorities that this machine trusts."""
    files = ours.issue(Role.WORKER, "a")
    with pytest.raises(ConfigError, match="no authority to check the other end by"):
        TlsFiles(None, files.certificate, files.key).channel_credentials()


def test_a_certificate_that_is_not_valid_yet_is_taken_when_it_is(
    ours: Issuer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority's clock may be ahead."""
    from ferrorpc.cli import authority

    files = ours.issue(Role.WORKER, "a")
    mine, before = kept(files, listening=True), Path(str(files.certificate)).read_bytes()
    with monkeypatch.context() as ahead:
        ahead.setattr(authority, "BACKDATED", -DAY / 2)
        ours.issue(Role.WORKER, "a")
    assert mine.renewed() is mine.renewed() is None
    assert mine.made == before
    (line,) = said(caplog)
    assert "not yet valid" in line
    with pytest.raises(AuthenticationError, match=r"not yet valid\ntry: set this host's clock.* or wait") as raised:
        files.check(listening=True)
    assert raised.value.retryable
    ours.issue(Role.WORKER, "a")
    assert mine.renewed() not in (None, before)


def test_files_that_change_while_they_are_read_are_not_taken(ours: Issuer) -> None:
    """What was checked would not be what is used."""
    files, fresh = (ours.issue(Role.WORKER, "a", where=where) for where in ("used", "fresh"))
    changes = [lambda: None, lambda: move(fresh.key, files.key), lambda: None]

    def make() -> str:
        content = Path(str(files.certificate)).read_text()
        changes.pop(0)()
        return content

    mine = tls._Reloaded(files, make, listening=True)
    before = mine.made
    ours.issue(Role.WORKER, "a", where="used")
    assert mine.renewed() is None
    assert mine.made == before
    ours.issue(Role.WORKER, "a", where="used")
    assert mine.renewed() == mine.made != before


def test_files_that_are_replaced_while_a_process_starts_are_read_again_but_not_for_ever(ours: Issuer) -> None:
    files = ours.issue(Role.WORKER, "a", where="used")
    changes = [True, False]

    def make() -> str:
        content = Path(str(files.certificate)).read_text()
        if changes.pop(0):
            ours.issue(Role.WORKER, "a", where="used")
        return content

    assert tls._Reloaded(files, make, listening=True).made == Path(str(files.certificate)).read_text()
    assert not changes
    changes += [True] * 20
    with pytest.raises(ConfigError, match="change faster than they can be read"):
        tls._Reloaded(files, make, listening=True)


def test_a_process_that_starts_between_two_replacements_reads_again(ours: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is the new one already and the certificate the old one, for a moment."""
    files, fresh = (ours.issue(Role.WORKER, "a", where=where) for where in ("used", "fresh"))
    move(fresh.key, files.key)
    check = TlsFiles.check

    def replaced_meanwhile(self: TlsFiles, *, listening: bool) -> object:
        try:
            return check(self, listening=listening)
        finally:
            if Path(str(files.certificate)).read_bytes() != Path(str(fresh.certificate)).read_bytes():
                move(fresh.certificate, files.certificate)

    monkeypatch.setattr(TlsFiles, "check", replaced_meanwhile)
    assert kept(files, listening=True).made == Path(str(fresh.certificate)).read_bytes()


def test_files_that_go_between_their_examination_and_their_use_change_nothing(ours: Issuer) -> None:
    files = ours.issue(Role.WORKER, "a", where="used")
    mine = tls._Reloaded(files, files._context, listening=True)
    before, make = mine.made, files._context

    def gone() -> ssl.SSLContext:
        Path(str(files.key)).unlink()
        return make()

    mine._make = gone
    ours.issue(Role.WORKER, "a", where="used")
    assert mine.renewed() is None
    assert mine.made is before


def test_an_authority_that_goes_while_it_is_read_is_named(ours: Issuer) -> None:
    files = ours.issue(Role.WORKER, "a")
    Path(str(files.authority)).unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*ca\.pem"):
        files.ends_at(listening=True)


def test_who_dials_with_what_has_expired_is_told_so(ours: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ours.issue(Role.WORKER, "a")
    mine = kept(files, listening=False)

    def expired(self: TlsFiles, *, listening: bool) -> None:
        raise AuthenticationError("the certificate is not accepted: certificate has expired")

    monkeypatch.setattr(TlsFiles, "check", expired)
    with pytest.raises(AuthenticationError, match="has expired"):
        mine.current()


def test_files_that_were_never_sound_are_refused_at_once(ours: Issuer) -> None:
    files = ours.issue(Role.WORKER, "a", lifetime=datetime.timedelta(minutes=-1))
    with pytest.raises(AuthenticationError, match="has expired"):
        kept(files, listening=False)
    with pytest.raises(ConfigError, match="cannot read"):
        kept(TlsFiles(files.authority, str(files.certificate) + "x", files.key), listening=True)


def test_who_dials_while_files_are_replaced_goes_on_with_a_pair(ours: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced between a look that found nothing new and the examination of what is there."""
    files, fresh = (ours.issue(Role.WORKER, "a", where=where) for where in ("used", "fresh"))
    mine, check = kept(files, listening=False), TlsFiles.check
    before = mine.made

    def replaced_meanwhile(self: TlsFiles, *, listening: bool) -> object:
        move(fresh.key, files.key)
        return check(self, listening=listening)

    monkeypatch.setattr(TlsFiles, "check", replaced_meanwhile)
    assert mine.current() == before


@pytest.mark.parametrize("name", ["coordinator.example", None])
def test_a_page_shows_a_renewed_certificate_from_the_next_handshake_on(ours: Issuer, name: str | None) -> None:
    """Also to whom names no host, as who dials an address."""
    files = ours.issue(Role.COORDINATOR, "a")
    listening = files.server_context()

    def serial() -> str:
        caller = ssl.create_default_context(cafile=files.authority)
        caller.check_hostname = False
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [caller.wrap_bio(down, up, server_hostname=name), listening.wrap_bio(up, down, server_side=True)]
        for end in ends * 3:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
        shown = ends[0].getpeercert()
        assert shown is not None
        return str(shown["serialNumber"])

    before = serial()
    assert serial() == before
    ours.issue(Role.COORDINATOR, "a")
    assert serial() != before
