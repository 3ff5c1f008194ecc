"""`ferrorpc certs issue` renews a certificate: who it names stays the same unless another is given."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from ferrorpc.cli import certs


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
