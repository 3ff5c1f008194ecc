"""Types of the commands' flags that click does not have."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """A duration in seconds; NaN is refused."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if math.isnan(seconds):
            self.fail(f"{value!r} is not a number of seconds", param, ctx)
        return seconds
