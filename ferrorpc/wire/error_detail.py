"""Conversion of errors (code, message, hint, typed fields) to ErrorDetail messages and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from ferrorpc.errors import FerroError
from ferrorpc.logs import escape_unprintable
from ferrorpc.v1 import error_pb2

_CONTINUED: Final = re.compile(r"\n(?! {4})")
"""A line end in a message before a line that is not indented, and so could pass for one of this process."""


def detail_of(error: FerroError) -> error_pb2.ErrorDetail:
    """The error as a message, from which `restore` makes an error of the same class with the same fields."""
    detail = error_pb2.ErrorDetail(
        code=int(error.code),  # type: ignore[arg-type]
        message=encodable(error.message),
        hint=encodable(error.hint),
        retryable=error.retryable,
    )
    for name, value in error.fields.items():
        _write(detail.fields.add(name=name), value)
    return detail


def encodable(text: str) -> str:
    """The text with escapes for what UTF-8 cannot encode, such as parts of the name of a file that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def restore(detail: error_pb2.ErrorDetail) -> FerroError:
    """The error that another process has sent. A code that this version does not know gives the root class.

    Unprintable characters, with which a text could control the terminal, become escapes. Line ends stay, but the lines of a
    message are indented from the second on.
    """
    fields = {field.name: _read(field) for field in detail.fields}
    message = _CONTINUED.sub("\n    ", _printable(detail.message))
    return FerroError.restore(detail.code, message, _printable(detail.hint), detail.retryable, fields)


def _printable(text: str) -> str:
    return "\n".join(map(escape_unprintable, text.split("\n")))


def _write(field: error_pb2.ErrorField, value: Any) -> None:
    if isinstance(value, bool):
        field.flag = value
    elif _is_number(value):
        field.number = value
    elif isinstance(value, float):
        field.real = value
    elif isinstance(value, Mapping):
        field.rank_texts.SetInParent()
        field.rank_texts.ranks.extend(int(rank) for rank in value)
        field.rank_texts.texts.extend(encodable(str(text)) for text in value.values())
    elif isinstance(value, list | tuple):
        _write_list(field, list(value))
    else:
        field.text = encodable(str(value))


def _write_list(field: error_pb2.ErrorField, values: list[Any]) -> None:
    if all(_is_number(value) for value in values):
        field.integers.SetInParent()
        field.integers.values.extend(values)
    else:
        field.texts.values.extend(encodable(str(value)) for value in values)


def _is_number(value: Any) -> bool:
    """Whether it is an integer of 64 bits. Larger ones, which an invalid request may contain, are sent as text."""
    return isinstance(value, int) and -(1 << 63) <= value < 1 << 63


def _read(field: error_pb2.ErrorField) -> Any:
    kind = field.WhichOneof("value")
    if kind == "integers":
        return list(field.integers.values)
    if kind == "text":
        return _printable(field.text)
    if kind == "texts":
        return list(map(_printable, field.texts.values))
    if kind == "rank_texts":
        return dict(zip(field.rank_texts.ranks, map(_printable, field.rank_texts.texts), strict=False))
    return None if kind is None else getattr(field, kind)
