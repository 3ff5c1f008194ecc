"""Every setting is documented, with the default and the words of the table it comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrorpc.config import SETTINGS, Setting
from tests.house.tree import ROOT

OPERATIONS = ROOT / "docs" / "operations.md"


def shown(value: object) -> str:
    """A default as docs/operations.md writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{int(value)}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def row(setting: Setting) -> str:
    """The line of docs/operations.md about one setting."""
    choices = f" ({', '.join(f'`{choice}`' for choice in setting.choices)})" if setting.choices else ""
    return f"| `{setting.variable}` | {shown(setting.default)} | {setting.help}{choices} |".replace("<", "&lt;").replace(
        ">", "&gt;"
    )


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_is_documented_as_it_is(setting: Setting) -> None:
    assert row(setting) in Path(OPERATIONS).read_text().splitlines(), f"write into docs/operations.md: {row(setting)}"
