"""Settings for diagnostic commands, which report every invalid variable instead of failing at the first one."""

from __future__ import annotations

from collections.abc import Mapping

from ferrorpc.config import SETTINGS, Config
from ferrorpc.errors import ConfigError


def split_invalid(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, ConfigError]]:
    """The environment without the variables whose values are invalid; and those variables, each with its error."""
    errors: dict[str, ConfigError] = {}
    for variable in (setting.variable for setting in SETTINGS):
        try:
            Config(environment={variable: environment.get(variable, "")})
        except ConfigError as error:
            errors[variable] = error
    return {name: value for name, value in environment.items() if name not in errors}, errors
