"""`ferrorpc certs`: a certificate authority, and certificates that name their holder's job and role.

Certificates are valid for hours, so nothing is revoked. Renewal replaces each file atomically, and running processes reload
them; a process that finds a new certificate beside the old key keeps its present pair until both have been replaced. Nothing
here uses the network.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ferrorpc.config import Config, plain_name, seconds
from ferrorpc.errors import BackendUnavailableError, ConfigError
from ferrorpc.wire.identity import Identity, Role

if TYPE_CHECKING:
    from ferrorpc.cli.authority import Authority

AUTHORITY_DAYS: Final = 365
AUTHORITY_DAYS_MAX: Final = 36_500
LEAF_HOURS: Final = 24.0


def _in_ascii(_: click.Context, __: click.Parameter, hosts: tuple[str, ...]) -> tuple[str, ...]:
    for host in hosts:
        if not host or not host.isascii():
            raise click.BadParameter(f"{host!r}: write the name in its ASCII form, such as xn--bcher-kva.example")
    return hosts


_jobs = click.option(
    "--job",
    "jobs",
    multiple=True,
    help="A job's name, or '*' for every job; default FERRORPC_JOB if set, else those of the certificate that is renewed.",
)
_hosts = click.option(
    "--host",
    "hosts",
    multiple=True,
    callback=_in_ascii,
    help="A name or address at which browsers reach the coordinator; default: those of the certificate that is renewed.",
)
_lifetime = click.option(
    "--lifetime", default=f"{LEAF_HOURS:g}h", show_default=True, help="How long certificates are valid, such as 12h."
)


@click.group("certs")
def command() -> None:
    """Make an authority and certificates for a job; FERRORPC_TLS_CA, FERRORPC_TLS_CERT and FERRORPC_TLS_KEY name the files."""


@command.command("init", short_help="Make an authority, and a certificate of each role.")
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default="certs")
@_jobs
@_hosts
@_lifetime
@click.option(
    "--days",
    type=click.IntRange(1, AUTHORITY_DAYS_MAX),
    default=AUTHORITY_DAYS,
    show_default=True,
    help="How long the authority is valid.",
)
def init(directory: Path, jobs: Sequence[str], hosts: Sequence[str], lifetime: str, days: int) -> None:
    """Make an authority in DIRECTORY, and a certificate of each role for a job.

    ca.key is the signing key: keep it away from the workers. Each process gets ca.pem and the .pem and .key of its role.
    """
    chosen, duration = _chosen(jobs), _duration(lifetime)
    if duration > datetime.timedelta(days=days):
        raise ConfigError(f"--lifetime {lifetime} is longer than the {days} days of the authority", hint="give more --days")
    authority = _authority().make(directory, days)
    for role in Role:
        authority.issue(role, _holders(chosen, role), hosts, duration, directory)
    click.echo(f"{directory}: ca.pem, ca.key, and .pem and .key of {', '.join(Role)}, valid for {lifetime}")


@command.command("issue", short_help="Issue or renew certificates.")
@click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.argument("roles", nargs=-1, required=True, type=click.Choice([role.value for role in Role]))
@_jobs
@_hosts
@_lifetime
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Where to write them; default DIRECTORY.")
def issue(
    directory: Path, roles: Sequence[str], jobs: Sequence[str], hosts: Sequence[str], lifetime: str, out: Path | None
) -> None:
    """Issue certificates of ROLES from the authority in DIRECTORY, replacing existing ones.

    A certificate that exists, where the new one goes or in DIRECTORY, is renewed: it keeps its jobs and hosts unless others are
    given. Where others may not write to the folder, new files have the owner, group and mode of those that they replace.
    """
    if hosts and Role.COORDINATOR not in roles:
        raise ConfigError("--host is for a coordinator's certificate", hint="leave --host away, or name that role too")
    chosen, duration, authority = _chosen(jobs), _duration(lifetime), _authority().read(directory)
    is_given, target = jobs or Config().source("job") != "default", out or directory
    for role in map(Role, roles):
        name = f"{role}.pem"
        found, old_hosts = authority.names_in(target / name, role) or authority.names_in(directory / name, role) or ((), ())
        holders = _holders(chosen, role) if is_given or not found else found
        authority.issue(role, holders, hosts or old_hosts, duration, target)
    click.echo(f"{target}: .pem and .key of {', '.join(roles)}, valid for {lifetime}")


def _authority() -> type[Authority]:
    """The class that makes certificates. Raises BackendUnavailableError where the package that it needs is not installed."""
    try:
        from ferrorpc.cli.authority import Authority
    except ModuleNotFoundError:
        raise BackendUnavailableError(
            "certificates are made with the package cryptography, which is not installed", hint="pip install 'ferrorpc[certs]'"
        ) from None
    return Authority


def _chosen(jobs: Sequence[str]) -> Sequence[str]:
    """The jobs to name, checked as the setting is, before any file is written."""
    for job in jobs:
        try:
            if job != "*":
                plain_name(job)
        except ValueError as error:
            raise ConfigError(f"--job {job!r}: {error}", hint="give the job's name, or '*' for every job") from None
    return jobs or (str(Config()["job"]),)


def _holders(jobs: Sequence[str], role: Role) -> list[Identity]:
    return [Identity.of(job, role) for job in jobs]


def _duration(text: str) -> datetime.timedelta:
    try:
        lifetime = datetime.timedelta(seconds=seconds(text))
    except ValueError as error:
        raise ConfigError(f"--lifetime {text!r}: {error}", hint="give a time such as 12h") from None
    if not lifetime:
        raise ConfigError("--lifetime 0: the certificate would expire at once", hint="give a time such as 12h")
    return lifetime
