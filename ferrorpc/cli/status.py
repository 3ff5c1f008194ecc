"""`ferrorpc status`: a job as its coordinator sees it."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, NoReturn

import click

from ferrorpc.cli.board import Earlier, as_text
from ferrorpc.cli.client import address_of, call, connect, token
from ferrorpc.config import Config
from ferrorpc.errors import AuthenticationError, ConfigError, CoordinatorUnavailableError, FerroError

if TYPE_CHECKING:
    from ferrorpc.v1.session_pb2 import StatusResponse
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

_WATCH_SECONDS = 1.0
_RATES_SECONDS = 4.0
"""What rates are taken over, or a little more."""
_HOME = "\x1b[H"
_CLEAR_LINE_END = "\x1b[K"
_CLEAR_BELOW = "\x1b[J"
_ROWS_FOR_THE_REST = 30
_ROWS_MIN = 8


@click.command("status")
@click.option("--coordinator", "--addr", "address", metavar="HOST:PORT", help="Default: FERRORPC_COORDINATOR, else port 29700.")
@click.option("--job", help="The job's name; default FERRORPC_JOB.")
@click.option("--watch", is_flag=True, help="Show it again every second, with rates, until interrupted.")
@click.option("--json", "as_json", is_flag=True, help="The coordinator's answer as JSON, one object a line.")
def command(address: str | None, job: str | None, watch: bool, as_json: bool) -> None:
    """Show a job: its members and what they do, open barriers and who is missing, generations and why each began, events."""
    config = Config({"job": job})
    where = address_of(address, config)
    if watch:
        _watch(where, config, as_json=as_json)
    try:
        with connect(where, config) as stub:
            response = _ask(stub, where, config)
    except ConfigError as error:
        if config.source("job") != "default" or error.fields.get("jobs") != 0:
            raise
        response = _nothing_yet(config)
        if not as_json:
            click.echo(f"no job has begun at {where} yet")
            return
    click.echo(as_json_text(response) if as_json else as_text(response))


class _Complaints:
    """What is in the way, on stderr, once for as long as it stays the same."""

    def __init__(self) -> None:
        self._told = ""

    def tell(self, error: FerroError) -> None:
        if error.message != self._told:
            click.echo(f"{time.strftime('%X')} {error.message}", err=True)
        self._told = error.message

    def over(self) -> None:
        self._told = ""


def _watch(where: str, config: Config, *, as_json: bool) -> NoReturn:
    """Until interrupted.

    A job that is not there yet is waited for, and so is a coordinator that has answered before: it may come back, and is then
    dialled anew, because certificates may have been renewed meanwhile.
    """
    past: list[tuple[float, StatusResponse]] = []
    complaints = _Complaints()
    while True:
        try:
            with connect(where, config) as stub:
                _follow(stub, where, config, past, complaints, as_json=as_json)
        except (AuthenticationError, ConfigError, CoordinatorUnavailableError) as error:
            if not past:
                raise
            complaints.tell(error)
            time.sleep(_WATCH_SECONDS)


def _follow(
    stub: CoordinatorServiceStub,
    where: str,
    config: Config,
    past: list[tuple[float, StatusResponse]],
    complaints: _Complaints,
    *,
    as_json: bool,
) -> NoReturn:
    """For as long as it answers. On a terminal each answer takes the place of the one before, without a flicker."""
    screen = sys.stdout.isatty() and not as_json
    while True:
        try:
            response, now = _ask(stub, where, config), time.monotonic()
            complaints.over()
        except ConfigError as error:
            complaints.tell(error)
            time.sleep(_WATCH_SECONDS)
            continue
        while len(past) > 1 and now - past[1][0] >= _RATES_SECONDS:
            del past[0]
        earlier = Earlier(past[0][1], now - past[0][0]) if past else None
        past.append((now, response))
        if as_json:
            click.echo(as_json_text(response))
        elif screen:
            rows = max(_ROWS_MIN, shutil.get_terminal_size().lines - _ROWS_FOR_THE_REST)
            lines = as_text(response, earlier, rows).splitlines()
            click.echo(_HOME + "".join(f"{line}{_CLEAR_LINE_END}\n" for line in lines) + _CLEAR_BELOW, nl=False)
        else:
            click.echo(as_text(response, earlier))
        time.sleep(_WATCH_SECONDS)


def _ask(stub: CoordinatorServiceStub, where: str, config: Config) -> StatusResponse:
    from ferrorpc.v1.session_pb2 import StatusRequest

    return call(stub.Status, StatusRequest(job=config["job"], token=token(config)), where)


def _nothing_yet(config: Config) -> StatusResponse:
    """What there is to say of the default job where none has begun."""
    from ferrorpc.v1.session_pb2 import StatusResponse

    return StatusResponse(job=config["job"])


def as_json_text(response: StatusResponse) -> str:
    """The whole answer, under the names of the protocol, absent numbers as 0."""
    import json

    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return json.dumps(fields)
