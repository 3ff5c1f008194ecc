"""`ferrorpc status`: a job as its coordinator sees it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from ferrorpc.cli.client import address_of, call, connect, token
from ferrorpc.cli.table import table
from ferrorpc.config import Config

if TYPE_CHECKING:
    from ferrorpc.v1.identity_pb2 import Member
    from ferrorpc.v1.session_pb2 import BarrierStatus, GenerationStatus, StatusResponse
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

_WATCH_SECONDS = 1.0
_CLEAR_SCREEN = "\x1b[H\x1b[2J"
_GENERATIONS_SHOWN = 8


@click.command("status")
@click.option("--coordinator", "--addr", "address", metavar="HOST:PORT", help="Default: FERRORPC_COORDINATOR, else port 29700.")
@click.option("--job", help="The job's name; default FERRORPC_JOB.")
@click.option("--watch", is_flag=True, help="Show it again every second, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="The coordinator's answer as JSON, one object a line.")
def command(address: str | None, job: str | None, watch: bool, as_json: bool) -> None:
    """Show a job: its members and what they do, open barriers and who is missing, generations and why each began."""
    config = Config({"job": job})
    where = address_of(address, config)
    with connect(where, config) as stub:
        while True:
            response = _ask(stub, where, config)
            text = as_json_text(response) if as_json else as_text(response)
            clear = _CLEAR_SCREEN if watch and not as_json and sys.stdout.isatty() else ""
            click.echo(clear + text)
            if not watch:
                return
            time.sleep(_WATCH_SECONDS)


def _ask(stub: CoordinatorServiceStub, where: str, config: Config) -> StatusResponse:
    from ferrorpc.v1.session_pb2 import StatusRequest

    return call(stub.Status, StatusRequest(job=config["job"], token=token(config)), where)


def as_json_text(response: StatusResponse) -> str:
    """The whole answer, under the names of the protocol, absent numbers as 0."""
    import json

    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(fields)


def as_text(response: StatusResponse) -> str:
    """The answer as a page of plain text."""
    position = response.position
    kept = "journal on disk" if response.durable else "in memory"
    parts = [
        f"job {response.job}  generation {position.generation}  cluster {position.cluster_id} epoch {position.epoch}  "
        f"({kept}, coordinator {response.version})",
        f"store: {response.store_keys} keys, {response.store_bytes} bytes",
    ]
    if response.waiting_reason:
        parts.append(f"waiting: {response.waiting_reason}")
    parts.append(_members(list(response.members)))
    if response.barriers:
        parts.append("open barriers\n" + "\n".join(_barrier(barrier) for barrier in response.barriers))
    if response.generations:
        shown = list(response.generations)[-_GENERATIONS_SHOWN:]
        parts.append("generations\n" + "\n".join(_generation(generation) for generation in shown))
    return "\n\n".join(parts)


def _members(members: list[Member]) -> str:
    if not members:
        return "no members"
    rows = [_member_row(member) for member in sorted(members, key=lambda m: (m.rank < 0, m.rank, m.name))]
    header = ("rank", "name", "state", "host", "step", "last beat", "doing", "why")
    return table(header, rows, right=frozenset({"rank", "step", "last beat"}))


def _member_row(member: Member) -> tuple[str, ...]:
    from ferrorpc.v1.identity_pb2 import MemberState

    state = MemberState.Name(member.state).removeprefix("MEMBER_STATE_").lower()
    return (
        str(member.rank) if member.rank >= 0 else "-",
        member.name,
        state,
        member.host or "-",
        str(member.step),
        f"{member.beat_age_ms / 1000:.1f} s",
        member.activity or "-",
        member.reason,
    )


def _barrier(barrier: BarrierStatus) -> str:
    missing = ", ".join(map(str, barrier.missing_ranks)) or "none"
    return (
        f"  {barrier.name} #{barrier.ordinal} of generation {barrier.generation}: {len(barrier.arrived_ranks)} arrived, "
        f"missing ranks {missing}, open for {barrier.age_ms / 1000:.1f} s"
    )


def _generation(generation: GenerationStatus) -> str:
    end = f"; ended: {generation.end_reason}" if generation.end_reason else ""
    return f"  {generation.generation}: {generation.size} members, {generation.reason}{end}"
