"""`ferrorpc status`: a job as its coordinator sees it."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ferrorpc.cli.client import address_of, call, connect, token
from ferrorpc.cli.parameters import coordinator_option, job_option
from ferrorpc.cli.status_text import PreviousStatus, as_text
from ferrorpc.cli.terminal import cut
from ferrorpc.config import Config
from ferrorpc.errors import AuthenticationError, ConfigError, CoordinatorUnavailableError, FerroError

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from ferrorpc.v1.session_pb2 import StatusResponse
    from ferrorpc.v1.session_pb2_grpc import CoordinatorServiceStub

_WATCH_SECONDS = 1.0
_RATES_SECONDS = 4.0
"""Rates are taken over this long, or a little more."""
_HOME = "\x1b[H"
_CLEAR_LINE = "\x1b[K"
"""Before a line: after one that is as wide as the terminal it would take its last character."""
_CLEAR_BELOW = "\x1b[J"
_OTHER_LINES = 30
_MEMBER_ROWS_MIN = 8


@click.command("status")
@coordinator_option
@job_option
@click.option("--watch", is_flag=True, help="Show it again every second, with rates, until interrupted.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="The coordinator's response as JSON, one object a line; empty before any job begins.",
)
def command(address: str | None, job: str | None, watch: bool, as_json: bool) -> None:
    """Show a job: its members and what they do, open barriers and who is missing, generations and why each began, events."""
    from ferrorpc.v1.identity_pb2 import Position
    from ferrorpc.v1.session_pb2 import StatusResponse

    config = Config({"coordinator": address, "job": job})
    if watch:
        _watch(config, as_json=as_json)
    try:
        with connect(config) as stub:
            response = _ask(stub, config)
    except ConfigError as error:
        if config.source("job") != "default" or error.fields.get("jobs") != 0:
            raise
        if not as_json:
            click.echo(f"no job has begun at {address_of(config)} yet")
            return
        response = StatusResponse(job=config["job"], position=Position())  # of generation 0
    click.echo(as_json_text(response) if as_json else as_text(response))


def _watch(config: Config, *, as_json: bool) -> NoReturn:
    """Shows the status until interrupted.

    Waits for a job that does not exist yet, and for a coordinator that has answered before. Such a coordinator is dialled anew,
    because certificates may have been renewed meanwhile.
    """
    token(config)  # one that cannot be read is not waited for as a job that has not begun is
    watch = _Watch(config, as_json=as_json)
    while True:
        try:
            with connect(config) as stub:
                watch.follow(stub)
        except (AuthenticationError, ConfigError, CoordinatorUnavailableError) as error:
            if not watch.has_been_answered:
                raise
            watch.pause_after(error)


class _Watch:
    """What was shown so far."""

    def __init__(self, config: Config, *, as_json: bool) -> None:
        self._config = config
        self._as_json = as_json
        self._history: list[tuple[float, StatusResponse]] = []
        self._problem = ""
        """The one that persists; it is told once."""

    @property
    def has_been_answered(self) -> bool:
        """Whether the coordinator has ever answered, if only that the job does not exist."""
        return bool(self._history or self._problem)

    def follow(self, stub: CoordinatorServiceStub) -> NoReturn:
        """Shows the status for as long as the coordinator answers."""
        while True:
            try:
                response, now = _ask(stub, self._config), time.monotonic()
            except ConfigError as error:
                self.pause_after(error)
                continue
            self._problem = ""
            self._show(response, self._previous(response, now))
            self._history.append((now, response))
            time.sleep(_WATCH_SECONDS)

    def pause_after(self, error: FerroError) -> None:
        """Tells on stderr what keeps the status from being shown."""
        text = str(error)
        if text != self._problem:
            click.echo(f"{time.strftime('%X')} {text}", err=True)
        self._problem = text
        time.sleep(_WATCH_SECONDS)

    def _show(self, response: StatusResponse, previous: PreviousStatus | None) -> None:
        """On a terminal each response overwrites the last one, and is cut to its size: from the bottom, and long lines at its
        width."""
        if self._as_json:
            click.echo(as_json_text(response))
        elif sys.stdout.isatty():
            terminal = shutil.get_terminal_size()
            rows = max(_MEMBER_ROWS_MIN, terminal.lines - _OTHER_LINES)
            lines = [cut(line, terminal.columns) for line in as_text(response, previous, rows).splitlines()]
            shown = "".join(f"{_CLEAR_LINE}{line}\n" for line in lines[: terminal.lines - 1])  # one more would scroll
            click.echo(_HOME + shown + _CLEAR_BELOW, nl=False)
        else:
            click.echo(as_text(response, previous))

    def _previous(self, response: StatusResponse, now: float) -> PreviousStatus | None:
        """What rates are taken from; forgets what came too long before, or is of another generation or start of the
        coordinator."""
        history = self._history
        if history and _when(history[-1][1]) != _when(response):
            history.clear()
        while len(history) > 1 and now - history[1][0] >= _RATES_SECONDS:
            del history[0]
        return PreviousStatus(history[0][1], now - history[0][0]) if history else None


def _when(response: StatusResponse) -> tuple[str, int, int]:
    position = response.position
    return position.cluster_id, position.epoch, position.generation


def _ask(stub: CoordinatorServiceStub, config: Config) -> StatusResponse:
    """The whole status, page by page."""
    from ferrorpc.v1.session_pb2 import StatusRequest

    request = StatusRequest(job=config["job"], token=token(config))
    response = call(stub.Status, request, config)
    while response.more:
        request.after = len(response.barriers) + len(response.members)
        response.ClearField("more")
        response.MergeFrom(call(stub.Status, request, config))
    return response


def as_json_text(response: StatusResponse) -> str:
    """The whole response, with the field names of the protocol; absent numbers are 0."""
    import json

    from google.protobuf.json_format import MessageToDict

    fields = MessageToDict(response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    _make_numbers(fields, response.DESCRIPTOR)
    return json.dumps(fields)


def _make_numbers(fields: dict[str, Any], message: Descriptor) -> None:
    """Makes numbers of the texts as which protobuf gives those of 64 bits, so that filters compare them as numbers."""
    for name, value in fields.items():
        field = message.fields_by_name[name]
        if field.message_type is not None:
            for part in value if isinstance(value, list) else [value]:
                _make_numbers(part, field.message_type)
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            fields[name] = [int(part) for part in value] if isinstance(value, list) else int(value)
