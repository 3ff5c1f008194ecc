"""How the library's log lines look, as the settings log_level and log_format say, and whose they are: job, rank, generation."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

WHERE: Final = ("job", "rank", "generation")
"""What a line tells of its origin, as attributes of its record: given with it (`extra`), else this process's own."""
_here: dict[str, Any] = {}


def say_where(job: str, rank: int, generation: int) -> None:
    """From now on this process's lines come from there."""
    _here.update(job=job, rank=rank, generation=generation)


def tame(text: str) -> str:
    """The text with what is not printable written out, line ends included: what others say of themselves may neither pass for
    a line of ours nor command a terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def set_up_logging(config: Mapping[str, Any]) -> None:
    """Gives the loggers `ferrorpc.*` their level, and a handler where the program has not set up logging itself."""
    logger = logging.getLogger("ferrorpc")
    logger.setLevel(config["log_level"])
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config["log_format"] == "json" else TextFormatter())
    logger.addHandler(handler)


def _where(record: logging.LogRecord) -> dict[str, Any]:
    """What of WHERE is known of a record. One that names its job is not of this process's rank."""
    own = record.__dict__ if "job" in record.__dict__ else _here
    return {name: own[name] for name in WHERE if own.get(name) is not None}


class TextFormatter(logging.Formatter):
    """Time, level, logger and origin, then the message, whose further lines are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(where)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record as a line (an exception adds more)."""
        where = " ".join(f"{name}={value}" for name, value in _where(record).items())
        record.where = f" [{where}]" if where else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first part of `format`, before an exception."""
        record.message = "\n    ".join(map(tame, record.message.split("\n")))
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object with time (seconds since the epoch), level, logger, origin and message."""
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            **_where(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
