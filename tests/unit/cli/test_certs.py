"""`ferrorpc certs issue` renews a certificate: who it names stays the same unless another is given."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from ferrorpc.cli import certs
from ferrorpc.wire.identity import Role


def run(*arguments: str) -> None:
    result = CliRunner().invoke(certs.command, arguments)
    assert result.exit_code == 0, result.output


def names(path: Path) -> list[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return sorted(str(name.value) for name in found)


@pytest.mark.parametrize(
    ("options", "jobs", "hosts"),
    [
        ([], ["a", "trial"], ["10.1.2.3", "c.example"]),
        (["--job", "b"], ["b"], ["10.1.2.3", "c.example"]),
        (["--host", "d.example"], ["a", "trial"], ["d.example"]),
    ],
    ids=["neither", "another job", "another host"],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_renewed_certificate_keeps_its_jobs_and_hosts(
    tmp_path: Path, options: list[str], jobs: list[str], hosts: list[str], elsewhere: bool
) -> None:
    run("init", str(tmp_path), "--job", "trial", "--job", "a", "--host", "c.example", "--host", "10.1.2.3")
    target = tmp_path / "fresh" if elsewhere else tmp_path
    run("issue", str(tmp_path), "coordinator", "worker", "--out", str(target), *options)
    coordinator = [f"ferrorpc://{job}/coordinator" for job in jobs] + [f"{job}.coordinator.ferrorpc" for job in jobs]
    assert names(target / "coordinator.pem") == sorted([*coordinator, *hosts])
    worker = [f"ferrorpc://{job}/worker" for job in jobs] + [f"{job}.worker.ferrorpc" for job in jobs]
    assert names(target / "worker.pem") == sorted(worker)


@pytest.mark.parametrize("job", ["llama_7b", "Trial", "v1.2"])
def test_a_renewed_certificate_stays_that_of_a_job_whose_name_is_written_as_a_hash(tmp_path: Path, job: str) -> None:
    run("init", str(tmp_path), "--job", job)
    before = {role: names(tmp_path / f"{role}.pem") for role in Role}
    run("issue", str(tmp_path), *(role.value for role in Role))
    assert {role: names(tmp_path / f"{role}.pem") for role in Role} == before


def test_a_job_that_is_set_comes_before_that_of_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("init", str(tmp_path), "--job", "*")
    monkeypatch.setenv("FERRORPC_JOB", "mine")
    run("issue", str(tmp_path), "admin", "--out", str(tmp_path / "new"))
    assert names(tmp_path / "new" / "admin.pem") == ["ferrorpc://mine/admin"]


def test_where_there_is_no_certificate_to_renew_it_is_for_the_default_job(tmp_path: Path) -> None:
    run("init", str(tmp_path), "--job", "*")
    (tmp_path / "observer.pem").write_text("half written")
    (tmp_path / "admin.pem").unlink()
    run("issue", str(tmp_path), "observer", "admin")
    assert names(tmp_path / "observer.pem") == ["ferrorpc://default/observer"]
    assert names(tmp_path / "admin.pem") == ["ferrorpc://default/admin"]


@pytest.mark.parametrize("link", [False, True])
def test_a_key_is_written_into_no_file_that_somebody_else_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """Whoever may write into the directory can make a file of any name there, or a link to a file elsewhere."""
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    other, directory = tmp_path / "other", tmp_path / "certs"
    directory.mkdir()
    other.write_text("important")
    for end in ("guessed", os.getpid()):
        made = directory / f".ca.key.{end}"
        made.symlink_to(other) if link else made.hardlink_to(other)
    result = CliRunner().invoke(certs.command, ["init", str(directory)])
    assert isinstance(result.exception, FileExistsError)
    assert other.read_text() == "important"
    assert not (directory / "ca.key").exists()


def test_what_is_made_for_a_moment_is_gone_and_keys_are_their_owners_alone(tmp_path: Path) -> None:
    run("init", str(tmp_path), "--job", "*")
    assert not list(tmp_path.glob(".*"))
    assert {path.stat().st_mode & 0o777 for path in tmp_path.glob("*.key")} == {0o600}


AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")


def access(path: Path) -> tuple[int, int, int]:
    state = path.stat()
    return state.st_uid, state.st_gid, state.st_mode & 0o777


@pytest.mark.parametrize(("before", "after"), [(0o640, 0o640), (0o400, 0o400), (0o666, 0o640)])
def test_a_renewed_key_has_the_mode_of_the_old_one_unless_that_is_too_wide(tmp_path: Path, before: int, after: int) -> None:
    directory = tmp_path / "certs"
    directory.mkdir(0o755)
    run("init", str(directory))
    for end in ("key", "pem"):
        (directory / f"worker.{end}").chmod(before)
    run("issue", str(directory), "worker")
    assert access(directory / "worker.key")[2] == after
    assert access(directory / "worker.pem")[2] == before & 0o644


@AS_ROOT
def test_a_service_of_another_user_can_read_the_key_that_root_renews(tmp_path: Path) -> None:
    run("init", str(tmp_path))
    key = tmp_path / "worker.key"
    os.chown(key, 10001, 10002)
    result = CliRunner().invoke(certs.command, ["issue", str(tmp_path), "worker"])
    assert (access(key), "ferrorpc:" in result.output) == ((10001, 10002, 0o600), False)


@AS_ROOT
def test_who_may_not_give_the_key_back_is_told_whose_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    run("init", str(tmp_path))
    key = tmp_path / "worker.key"
    key.chmod(0o640)
    os.chown(key, 10001, 10002)
    monkeypatch.setattr(os, "fchown", refuse)
    result = CliRunner().invoke(certs.command, ["issue", str(tmp_path), "worker"])
    assert (result.exit_code, access(key)) == (0, (0, 0, 0o600)), "another group than the old one's never reads it"
    assert result.output.count("ferrorpc:") == 1
    assert f"{key} does not have the owner" in result.output
    assert f"chown 10001:10002 {key} && chmod 640 {key}" in result.output


@AS_ROOT
def test_a_key_is_not_given_to_whoever_has_made_a_file_of_its_name(tmp_path: Path) -> None:
    """In a directory that others may write to, nobody knows who made the file."""
    run("init", str(tmp_path))
    tmp_path.chmod(0o775)
    key = tmp_path / "worker.key"
    key.unlink()
    key.touch(0o640)
    os.chown(key, 10001, 0)
    result = CliRunner().invoke(certs.command, ["issue", str(tmp_path), "worker"])
    assert access(key) == (0, 0, 0o600)
    assert f"chmod go-w {tmp_path}" in result.output
