"""`ferrorpc`: the group of all commands. Each is imported only when called, so that `ferrorpc --help` is fast."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any, Final

import click

from ferrorpc.cli.lazy_group import Entry, LazyGroup
from ferrorpc.errors import FerroError
from ferrorpc.exit_codes import EXIT_CONFIG, EXIT_INTERRUPTED, EXIT_PIPE, exit_code_of

COMMANDS: Final = {
    "run": Entry("ferrorpc.cli.run", "Run a script in several processes, on one machine or on each of several."),
    "coordinator": Entry("ferrorpc.cli.coordinator", "Run the coordinator service."),
    "status": Entry("ferrorpc.cli.status", "Show a job: members, barriers, generations."),
    "remove": Entry("ferrorpc.cli.remove", "Take a member out of a job; needs the role admin."),
    "health": Entry("ferrorpc.cli.health", "Ask a server whether it is healthy; exit code 0 or 1."),
    "demo": Entry("ferrorpc.cli.demo", "Train a small network on handwritten digits, on four processes."),
    "bench": Entry("ferrorpc.cli.bench.command", "Measure rendezvous, barriers and collectives."),
    "plan": Entry("ferrorpc.cli.plan", "Show what a collective or a pipeline schedule would do and cost, before it runs."),
    "config": Entry("ferrorpc.cli.config", "Show each setting's value and where it came from."),
    "certs": Entry("ferrorpc.cli.certs", "Make an authority and certificates for a job."),
    "doctor": Entry("ferrorpc.cli.doctor", "Check for what would keep a job from working here, and say how to mend it."),
    "version": Entry("ferrorpc.cli.version", "Show the version of ferrorpc; with -v, also the versions of what it depends on."),
}
"""Command -> its module, which has a click command called `command`, and its line in `--help`."""

_NO_ARGUMENTS: Final[Any] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""Raised for a group without a command. click 8.1 lacks it and shows the help without an exception."""


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    """Runs the command, whose module is imported only here."""
    command = cli.get_command(context, "version")
    if is_asked and command is not None:
        context.invoke(command)
        context.exit()


_version_option = click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version and exit."
)
cli = _version_option(
    LazyGroup(
        COMMANDS,
        name="ferrorpc",
        help="Several processes train one model. Start with `ferrorpc demo`, then `ferrorpc run -n 4 train.py`.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
        no_args_is_help=True,
    )
)


def main() -> None:
    """The `ferrorpc` program. Exits with 0, the command's own code, 64 for bad configuration or 75 for "try again"."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and messages of other processes may be in any alphabet
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code. Errors are shown as their message, without a traceback."""
    try:
        return _run(arguments)
    except BrokenPipeError:  # nobody reads standard error either, as in `2>&1 | head`
        return EXIT_PIPE


def _run(arguments: list[str]) -> int:
    try:
        result = cli.main(arguments, prog_name="ferrorpc", standalone_mode=False)
    except _NO_ARGUMENTS as error:
        click.echo(error.format_message())
        return 0
    except click.UsageError as error:
        error.show()
        return EXIT_CONFIG
    except click.Abort:
        return EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FerroError as error:
        click.echo(f"ferrorpc: {error}", err=True)
        return exit_code_of(error) or 1
    except SystemExit as end:  # from click: 0 after shell completion, 1 for a closed pipe (`| head`); or as of a signal
        return EXIT_PIPE if end.code == 1 else int(end.code or 0)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        where = error.filename or "what it writes to"
        click.echo(f"ferrorpc: {where}: {error.strerror}\ntry: check the path, and who may write there", err=True)
        return EXIT_CONFIG
    return result if isinstance(result, int) else 0
