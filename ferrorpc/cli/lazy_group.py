"""A command group that imports a command only when it is called."""

from __future__ import annotations

import shlex
from importlib import import_module
from typing import NamedTuple

import click


class Entry(NamedTuple):
    """A command's module, and its line in the group's help, which is shown without importing it."""

    module: str
    help: str


class LazyGroup(click.Group):
    """A group whose commands are listed in a table and imported when called."""

    def __init__(self, entries: dict[str, Entry], **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self._entries = entries

    def list_commands(self, context: click.Context) -> list[str]:
        return list(self._entries)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        command = import_module(entry.module).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, context: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith(".py"):
            context.fail(f"{args[0]} is a script and no command: start it with `ferrorpc run -n 4 {shlex.quote(args[0])}`")
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in self._entries.items()])
