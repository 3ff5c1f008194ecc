"""Settings for commands that are there to find what is wrong: a bad variable is one finding, and hides no other."""

from __future__ import annotations

from collections.abc import Mapping

from ferrorpc.config import SETTINGS, Config
from ferrorpc.errors import ConfigError


def sound(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, ConfigError]]:
    """The environment without the variables whose values no setting takes; and those, with what is wrong."""
    wrong: dict[str, ConfigError] = {}
    for variable in (setting.variable for setting in SETTINGS):
        try:
            Config(environment={variable: environment.get(variable, "")})
        except ConfigError as error:
            wrong[variable] = error
    return {name: value for name, value in environment.items() if name not in wrong}, wrong
