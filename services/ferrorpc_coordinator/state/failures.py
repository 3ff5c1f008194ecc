"""Errors as the wire carries them. Decisions raise ferrorpc's errors; here they become ErrorDetail."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ferrorpc.errors import FerroError, LimitExceededError
from ferrorpc.v1 import error_pb2


class Refused(Exception):
    """A request is answered with an error that exists already, such as the first cause of a generation's end."""

    def __init__(self, detail: error_pb2.ErrorDetail) -> None:
        super().__init__(detail.message)
        self.detail = detail


def detail_of(error: FerroError) -> error_pb2.ErrorDetail:
    """The error as a message."""
    code = error_pb2.ErrorCode.ValueType(error.code)
    detail = error_pb2.ErrorDetail(code=code, message=error.message, hint=error.hint, retryable=error.retryable)
    for name, value in error.fields.items():
        _fill(detail.fields.add(name=name), value)
    return detail


def _fill(field: error_pb2.ErrorField, value: Any) -> None:
    if isinstance(value, bool):
        field.flag = value
    elif isinstance(value, int):
        field.number = value
    elif isinstance(value, float):
        field.real = value
    elif isinstance(value, Mapping):
        field.rank_texts.ranks.extend(value.keys())
        field.rank_texts.texts.extend(value.values())
    elif isinstance(value, list):
        _fill_list(field, value)
    else:
        field.text = str(value)


def _fill_list(field: error_pb2.ErrorField, values: list[Any]) -> None:
    if all(isinstance(value, int) for value in values):
        field.integers.values.extend(values)
        field.integers.SetInParent()
    else:
        field.texts.values.extend(str(value) for value in values)


def require(what: str, amount: int, limit: str, most: int) -> None:
    """Refuses an amount past a limit of `settings.Limits`.

    Raises:
        LimitExceededError: naming the limit.
    """
    if amount > most:
        raise LimitExceededError(f"{what} would be {amount}, the limit {limit} is {most}", limit=limit, most=most)


def seconds(duration_ns: int) -> str:
    """A duration as a message says it, such as "2.0 s"."""
    return f"{duration_ns / 1e9:.1f} s"
