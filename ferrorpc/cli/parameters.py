"""Flags that several commands have, and types of flags that click does not have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

coordinator_option = click.option(
    "--coordinator", "--addr", "address", metavar="HOST:PORT", help="Default: FERRORPC_COORDINATOR, else port 29700."
)
job_option = click.option("--job", help="The job's name; default FERRORPC_JOB.")


class Seconds(click.FloatRange):
    """A duration in seconds; NaN is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds


class Directory(click.Path):
    """A directory's path. An empty one, as of a variable that is not set, would mean the working directory, and is refused."""

    def __init__(self) -> None:
        super().__init__(file_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not value:
            self.fail("expected a path", param, ctx)
        return super().convert(value, param, ctx)
