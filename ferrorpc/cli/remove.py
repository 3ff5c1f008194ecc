"""`ferrorpc remove`: removes a member from a job, as if its process had ended."""

from __future__ import annotations

import click

from ferrorpc.cli.client import report
from ferrorpc.cli.parameters import coordinator_option, job_option
from ferrorpc.config import Config


@click.command("remove")
@click.argument("name")
@click.option("--reason", default="", help="Told to the other members.")
@coordinator_option
@job_option
def command(name: str, reason: str, address: str | None, job: str | None) -> None:
    """Take the member NAME out of its job: the others treat it as dead from now on, whatever its process does.

    `ferrorpc status` shows the names. Where the coordinator requires tokens or certificates, those of an admin are needed.
    """
    from ferrorpc.v1.session_pb2 import Removal, ReportRequest

    config = Config({"coordinator": address, "job": job})
    report(ReportRequest(removal=Removal(name=name, reason=reason)), config)
    click.echo(f"{name} is out of job {config['job']}")
