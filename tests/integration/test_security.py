"""Who a coordinator refuses, that each refusal says why and is logged, and what listens where by default."""

import datetime
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from ferrorpc.cli.main import run
from ferrorpc.config import Config
from ferrorpc.coordination.session import RemoteSession
from ferrorpc.errors import AuthenticationError, ConfigError, FerroError, PermissionDeniedError
from ferrorpc.wire.identity import Identity, Role
from ferrorpc.wire.tls import TlsFiles
from tests.certificates import DAY, Issuer, settings, variables
from tests.integration.coordinator_process import coordinator, refused_start
from tests.integration.launching import environment
from tests.waiting import eventually

pytest.importorskip("cryptography")
GONE = datetime.timedelta(minutes=-1)


def join(address, job="a", **config):
    session = RemoteSession(address, job=job, name="m", policy=(1, 1), config=Config({"timeout": 10.0, **config}, {})).join()
    session.leave()


def flags(files):
    return [word for name, path in settings(files).items() for word in (f"--{name.replace('_', '-')}", path)]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return Issuer(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Issuer(tmp_path_factory.mktemp("certificates") / "theirs")


def everywhere(process):
    return f"127.0.0.1:{process.address.rpartition(':')[2]}"


def test_a_coordinator_lets_in_workers_of_its_jobs_and_nobody_else(ours, theirs, monkeypatch, capsys):
    worker = settings(ours.issue(Role.WORKER, "a"))
    expired = settings(ours.issue(Role.WORKER, "a", lifetime=GONE, where="expired"))
    foreign = settings(theirs.issue(Role.WORKER, "a")) | {"tls_ca": worker["tls_ca"]}
    with coordinator(*flags(ours.issue(Role.COORDINATOR, "*")), listen="0.0.0.0:0") as process:
        address = everywhere(process)
        join(address, **worker)
        refusals = [
            (settings(ours.issue(Role.WORKER, "b")), PermissionDeniedError, "worker of job b, not of job 'a'"),
            (settings(ours.issue(Role.OBSERVER, "a")), PermissionDeniedError, "observer of job a; this needs the role worker"),
            (expired, AuthenticationError, "expired.* is not accepted: certificate has expired"),
            (foreign, AuthenticationError, "is not accepted: unable to get local issuer"),
            (settings(theirs.issue(Role.WORKER, "a")), AuthenticationError, "is not the coordinator of job 'a'"),
            ({"tls_ca": worker["tls_ca"]}, AuthenticationError, "wants a certificate and this process has none"),
            ({}, AuthenticationError, "speaks TLS and this process does not"),
        ]
        for config, kind, words in refusals:
            began = time.monotonic()
            with pytest.raises(kind, match=words):
                join(address, **config)
            assert time.monotonic() - began < 8
        for role, code in ((Role.WORKER, 64), (Role.ADMIN, 1)):
            for name, value in variables(ours.issue(role, "a")).items():
                monkeypatch.setenv(name, value)
            assert run(["remove", "nobody", "--addr", address, "--job", "a"]) == code
        said = capsys.readouterr().err
        assert "worker of job a; this needs the role admin" in said
        assert "no living member of job a is called 'nobody'" in said
        log = process.stop()[1]
    assert "worker of job b" in log
    assert "needs the role admin" in log
    assert "ipv4:127.0.0.1" in log
    assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in log
    assert "PRIVATE" not in log


def test_a_coordinator_may_ask_itself_whether_it_is_well_and_no_more(ours, monkeypatch, capsys):
    files = ours.issue(Role.COORDINATOR, "a")
    for name, value in variables(files).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("FERRORPC_JOB", "a")
    with coordinator(*flags(files)) as process:
        assert run(["health", "--addr", process.address]) == 0
        assert run(["status", "--addr", process.address]) == 64
        for name in variables(files):
            monkeypatch.delenv(name)
        assert run(["health", "--addr", process.address]) == 1
    told = capsys.readouterr().err
    assert "coordinator of job a; this needs the role observer" in told
    assert "speaks TLS and this process does not" in told


def test_tokens_with_roles_over_tls(ours, tmp_path):
    tokens = {"observer": "token-of-an-observer", "worker@a": "token-of-a-worker-of-a", "admin": "token-of-an-admin"}
    (tmp_path / "tokens").write_text("".join(f"{who} {token}\n" for who, token in tokens.items()))
    for name, token in {**tokens, "guess": "token-of-nobody-at-all"}.items():
        (tmp_path / name).write_text(token + "\n")
    shown = ours.issue(Role.COORDINATOR, "a")
    one_way = {"tls_cert": shown.certificate, "tls_key": shown.key, "token_file": str(tmp_path / "tokens")}
    words = [word for name, path in one_way.items() for word in (f"--{name.replace('_', '-')}", path)]
    with coordinator(*words, listen="0.0.0.0:0") as process:
        for who, job, kind in (
            ("worker@a", "a", None),
            ("worker@a", "b", PermissionDeniedError),
            ("observer", "a", PermissionDeniedError),
            ("guess", "a", AuthenticationError),
            (None, "a", AuthenticationError),
        ):
            config = {"tls_ca": shown.authority} | ({} if who is None else {"token_file": str(tmp_path / who)})
            if kind is None:
                join(everywhere(process), job, **config)
                continue
            with pytest.raises(kind):
                join(everywhere(process), job, **config)
        with pytest.raises(ConfigError, match="lists several tokens"):
            join(everywhere(process), **(config | {"token_file": str(tmp_path / "tokens")}))
        log = process.stop()[1]
    assert log.count("was refused") == 4
    assert not any(token in log for token in [*tokens.values(), "token-of-nobody-at-all"])


def test_a_token_is_replaced_while_the_coordinator_and_a_member_run(tmp_path):
    old, new = "the-old-token-of-a-job", "the-new-token-of-a-job"
    listed, mine = tmp_path / "tokens", tmp_path / "mine"
    listed.write_text(f"worker {old}\n")
    mine.write_text(old)
    with coordinator("--token-file", str(listed), "--data-dir", str(tmp_path / "journal"), "--grace", "20") as process:
        config = Config({"timeout": 10.0, "token_file": str(mine)}, {})
        session = RemoteSession(process.address, job="b", name="m", policy=(1, 1), config=config).join()
        listed.write_text(f"worker {old}\nworker {new}\n")
        mine.write_text(new)
        eventually(lambda: joined_with(process.address, mine), "the coordinator takes the new token")
        listed.write_text(f"worker {new}\n")
        (tmp_path / "late").write_text(old)
        eventually(lambda: not joined_with(process.address, tmp_path / "late"), "the old one is refused")
        process.kill()
        another = process.again()
        try:
            session.store.set("still", b"here")
            assert session.store.get("still") == b"here"
            session.leave()
        finally:
            log = another.stop()[1]
        assert old not in log
        assert new not in log


def joined_with(address, token_file):
    try:
        join(address, token_file=str(token_file))
    except AuthenticationError:
        return False
    return True


def test_a_certificate_is_renewed_while_the_coordinator_runs(ours):
    files = ours.issue(Role.COORDINATOR, "a", where="renewed", lifetime=datetime.timedelta(seconds=600))
    worker = settings(ours.issue(Role.WORKER, "a"))

    def serial(address):
        context = ssl.create_default_context(cafile=files.authority)
        context.load_cert_chain(worker["tls_cert"], worker["tls_key"])
        host, port = address.split(":")
        plain = socket.create_connection((host, int(port)), 5)
        with context.wrap_socket(plain, server_hostname="a.coordinator.ferrorpc") as connection:
            return connection.getpeercert()["serialNumber"]

    with coordinator(*flags(files)) as process:
        before = serial(process.address)
        ours.issue(Role.COORDINATOR, "a", where="renewed")
        after = serial(process.address)
        with open(files.key, "w") as half_written:
            half_written.write("-----BEGIN")
        assert serial(process.address) == after != before
        join(process.address, **worker)
        assert "do not fit (yet)" in process.stop()[1]


def test_an_outage_that_certificates_are_to_blame_for_ends_with_their_error(ours, theirs):
    """Somebody answers there, and gRPC's words for why that does not count would end as "nobody answered"."""
    config = Config({"timeout": 10.0, "max_outage": 3.0, **settings(ours.issue(Role.WORKER, "a"))}, {})
    with coordinator(*flags(ours.issue(Role.COORDINATOR, "a"))) as process, ThreadPoolExecutor(1) as pool:
        session = RemoteSession(process.address, job="a", name="m", policy=(1, 1), config=config).join()
        other = grpc.server(pool)
        process.kill()
        other.add_secure_port(process.address, theirs.issue(Role.COORDINATOR, "a").server_credentials())
        other.start()
        with pytest.raises(AuthenticationError, match=f"who listens at {process.address} is not the coordinator of job 'a'"):
            session.store.get("key", timeout=0)
        session.leave()
        other.stop(0).wait(5)


def test_a_member_that_cannot_come_back_because_its_certificate_has_expired_says_so_at_once(ours, caplog):
    """And not after the outage that it takes for one: until then a renewed certificate would help."""
    with coordinator(*flags(ours.issue(Role.COORDINATOR, "a"))) as process:
        files = ours.issue(Role.WORKER, "a", where="short", lifetime=datetime.timedelta(seconds=4))
        config = Config({"timeout": 10.0, **settings(files)}, {})
        session = RemoteSession(process.address, job="a", name="m", policy=(1, 1), config=config).join()
        time.sleep(max(0.0, files.ends_at(listening=False) - time.time()) + 1.0)
        process.kill()
        another = process.again()
        eventually(lambda: f"still without the coordinator at {process.address}: the certificate" in caplog.text)
        assert caplog.text.count("still without") == 1
        ours.issue(Role.WORKER, "a", where="short")
        eventually(lambda: "the session goes on" in caplog.text or "this is a new session" in caplog.text)
        session.leave()
        another.stop()


@pytest.mark.parametrize(
    ("left_out", "extra", "complaint"),
    [
        (("tls_ca",), [], "if encrypted"),
        ((), ["--http-port", "0"], "browsers bring no certificate"),
        (("tls_key",), [], "belong together"),
    ],
)
def test_encryption_alone_opens_no_port_to_strangers(ours, left_out, extra, complaint):
    given = {name: path for name, path in settings(ours.issue(Role.COORDINATOR, "a")).items() if name not in left_out}
    words = [word for name, path in given.items() for word in (f"--{name.replace('_', '-')}", path)]
    code, errors = refused_start("--listen", "0.0.0.0:0", *words, *extra)
    assert (code, complaint in errors) == (64, True), errors


def test_a_coordinator_whose_hosts_clock_is_behind_may_be_started_again(ours, monkeypatch):
    """As a scheduler does for exit code 75: once the clock is set, the certificate is valid."""
    from ferrorpc.cli import authority

    monkeypatch.setattr(authority, "BACKDATED", -DAY / 2)
    files = ours.issue(Role.COORDINATOR, "a", where="later")
    code, errors = refused_start("--listen", "127.0.0.1:0", environment=variables(files))
    assert (code, "not yet valid" in errors) == (75, True), errors


@pytest.mark.parametrize("with_certificate", [False, True])
def test_a_file_that_holds_no_authority_is_blamed_by_its_name(ours, tmp_path, with_certificate):
    worker = ours.issue(Role.WORKER, "a")
    junk = tmp_path / "ca.pem"
    junk.write_text("this is no PEM\n")
    files = TlsFiles(str(junk), *((worker.certificate, worker.key) if with_certificate else ()))
    for listening in (False, True):
        with pytest.raises(ConfigError, match=f"{junk} holds no certificate of an authority"):
            files.check(listening=listening)


def test_no_certificate_is_made_that_outlives_its_authority(ours, tmp_path, capsys):
    assert run(["certs", "init", str(tmp_path / "new"), "--days", "1", "--lifetime", "72h"]) == 64
    assert not (tmp_path / "new").exists()
    assert run(["certs", "issue", str(ours.directory), "worker", "--lifetime", "72h", "--out", str(tmp_path)]) == 64
    assert not list(tmp_path.iterdir())
    assert run(["certs", "init", str(tmp_path / "new"), "--days", "99999999"]) == 64
    assert run(["certs", "init", str(tmp_path / "a-day"), "--days", "1"]) == 0
    assert "outlive its authority, which ends" in capsys.readouterr().err


def test_nothing_is_signed_with_a_key_that_is_not_the_authoritys(ours, theirs, tmp_path, capsys):
    """Or every process would refuse the certificate, and only once it is in use."""
    for name, source in (("ca.pem", ours), ("ca.key", theirs)):
        shutil.copy(source.directory / name, tmp_path)
    issue = ["certs", "issue", str(tmp_path), "worker", "--job", "a"]
    assert run(issue) == 64
    said = capsys.readouterr().err
    assert f"{tmp_path / 'ca.key'} is not the key of a certificate in {tmp_path / 'ca.pem'}" in said
    assert not (tmp_path / "worker.pem").exists()
    (tmp_path / "ca.pem").write_bytes(b"".join((one.directory / "ca.pem").read_bytes() for one in (ours, theirs)))
    assert run(issue) == 0, "of several authorities in the file, as while one replaces another, that of the key is taken"
    for authority in (tmp_path, theirs.directory):
        files = TlsFiles(str(authority / "ca.pem"), str(tmp_path / "worker.pem"), str(tmp_path / "worker.key"))
        assert files.check(listening=True) == {Identity.of("a", Role.WORKER)}


def test_a_wrong_variable_leaves_no_half_authority_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("FERRORPC_JOB", "a job")
    assert run(["certs", "init", str(tmp_path / "new")]) == 64
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kept_elsewhere", ["ca.key", "ca.pem", ""])
def test_an_authority_is_never_replaced_not_even_where_its_key_is_kept_elsewhere(tmp_path, capfd, kept_elsewhere):
    """Everything that trusts it would refuse the new certificates, and the job would lose its members one by one."""
    directory = tmp_path / "certs"
    assert run(["certs", "init", str(directory)]) == 0
    if kept_elsewhere:
        (directory / kept_elsewhere).rename(tmp_path / kept_elsewhere)
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert run(["certs", "init", str(directory)]) == 64
    assert "has an authority already: ca." in capfd.readouterr().err
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before


def test_a_host_is_the_coordinators_also_where_other_roles_are_issued_beside_it(ours, tmp_path, capsys):
    x509 = pytest.importorskip("cryptography.x509")
    issue = ["certs", "issue", str(ours.directory), "--out", str(tmp_path), "--host", "box.example"]
    assert run([*issue, "coordinator", "worker"]) == 0

    def names(role):
        certificate = x509.load_pem_x509_certificate((tmp_path / f"{role}.pem").read_bytes())
        said = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return said.get_values_for_type(x509.DNSName)

    assert "box.example" in names("coordinator")
    assert "box.example" not in names("worker")
    assert run([*issue, "worker", "observer"]) == 64
    assert "try: leave --host away" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong", [["--host", "büro.example"], ["--host", ""], ["--lifetime", "0"], ["--job", "a job"], ["--job", ""]]
)
def test_nothing_is_made_of_what_no_certificate_can_say(tmp_path, wrong, capsys):
    assert run(["certs", "init", str(tmp_path / "new"), *wrong]) == 64
    assert not (tmp_path / "new").exists()
    assert wrong[0] in capsys.readouterr().err


def test_a_workers_certificate_does_not_start_a_coordinator(ours):
    """Also where a launcher or rank 0 would start one, with the settings of the workers."""
    code, errors = refused_start("--listen", "127.0.0.1:0", *flags(ours.issue(Role.WORKER, "a")))
    assert code == 64
    assert "the certificate of worker of job a: members would refuse" in errors
    assert "try: start `ferrorpc coordinator` with coordinator.pem" in errors


def test_an_expired_certificate_does_not_start_a_coordinator(ours):
    files = ours.issue(Role.COORDINATOR, "a", lifetime=GONE, where="expired-coordinator")
    code, errors = refused_start("--listen", "127.0.0.1:0", *flags(files))
    assert (code, "certificate has expired" in errors) == (64, True), errors
    assert "Traceback" not in errors


def test_the_status_page_speaks_tls_where_the_coordinator_does(ours, tmp_path):
    pytest.importorskip("uvicorn")
    (tmp_path / "tokens").write_text("observer token-of-an-observer\nworker@a token-of-a-worker-of-a\n")
    files = ours.issue(Role.COORDINATOR, "a")
    with coordinator(*flags(files), "--token-file", str(tmp_path / "tokens"), "--http-port", "0") as process:
        context = ssl.create_default_context(cafile=files.authority)
        for token, status in (("token-of-an-observer", b"200"), ("token-of-a-worker-of-a", b"401"), ("", b"401")):
            host, port = process.http_address.split(":")
            plain = socket.create_connection((host, int(port)), 5)
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as page:
                page.sendall(f"GET /metrics HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
                assert page.recv(100).split()[1] == status


def test_a_worker_does_not_listen_beyond_loopback_in_the_clear():
    code = "import ferrorpc; ferrorpc.init_process_group(coordinator='127.0.0.1:1', world_size=2, bind='0.0.0.0', timeout=5)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment())
    assert "FERRORPC_BIND=0.0.0.0 without TLS" in done.stderr


def listeners(processes):
    """host:port of every TCP socket that these processes listen on, from /proc."""
    inodes = set()
    for process in processes:
        for descriptor in os.listdir(f"/proc/{process}/fd"):
            try:
                target = os.readlink(f"/proc/{process}/fd/{descriptor}")
            except FileNotFoundError:
                continue
            inodes.add(target.removeprefix("socket:[").rstrip("]"))
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with open(f"/proc/net/{table}") as lines:
            rows = [line.split() for line in lines][1:]
        for row in rows:
            if row[3] == "0A" and row[9] in inodes:
                raw = bytes.fromhex(row[1].partition(":")[0])
                words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
                found.append(socket.inet_ntop(family, words))
    return [address.removeprefix("::ffff:") for address in found]


def test_a_default_start_listens_on_loopback_only(tmp_path):
    code = "import ferrorpc, sys; g = ferrorpc.init_process_group(); g.barrier(); print('up', flush=True); sys.stdin.read()"
    with coordinator("--http-port", "0") as process:
        found = environment(FERRORPC_COORDINATOR=process.address, FERRORPC_WORLD_SIZE="2")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": found}
        ranks = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(2)]
        assert [rank.stdout.readline() for rank in ranks] == ["up\n"] * 2
        found = [listeners([one.pid]) for one in (process.process, *ranks)]
        for rank in ranks:
            rank.communicate("", timeout=30)
    assert [len(addresses) for addresses in found] == [2, 1, 1]
    assert {address for addresses in found for address in addresses} == {"127.0.0.1"}


def test_secrets_are_in_no_repr(ours):
    files = ours.issue(Role.WORKER, "a")
    assert "PRIVATE" not in repr(files)
    with pytest.raises(FerroError) as caught:
        TlsFiles(files.authority, files.key, files.key).check(listening=False)
    assert "PRIVATE" not in str(caught.value)


def test_a_launchers_reports_go_on_when_the_authority_is_replaced(tmp_path):
    """The process that sends them lives as long as the job, which may be far longer than a certificate."""

    def issued(name):
        issuer = Issuer(tmp_path / name)
        return issuer.issue(Role.COORDINATOR, "a"), issuer.issue(Role.WORKER, "a")

    (shown, mine), (renewed, fresh) = issued("old"), issued("new")
    report = b'{"name": "nobody", "launch": "", "returncode": 1, "reason": ""}\n'
    with coordinator(*flags(shown)) as process:
        command = [sys.executable, "-m", "ferrorpc.cli.launcher.exit_reporter", process.address, "a"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment() | variables(mine)}
        with subprocess.Popen(command, **pipes) as reporter:
            assert reporter.stdout.readline() == b"ready\n"

            def answer():
                reporter.stdin.write(report)
                reporter.stdin.flush()
                return reporter.stdout.readline()

            before = answer()
            process.kill()
            for old, new in ((shown, renewed), (mine, fresh)):
                for path, source in zip(settings(old).values(), settings(new).values(), strict=True):
                    shutil.copyfile(source, path)
            with open(mine.key, "r+") as key:
                whole = key.read()
                key.truncate(40)
            half = answer()
            with open(mine.key, "w") as key:
                key.write(whole)
            another = process.again()
            try:
                after = answer()
            finally:
                another.stop()
                reporter.stdin.close()
    assert b"reach" not in before
    assert half.startswith(b"failed: ")
    assert after == before
