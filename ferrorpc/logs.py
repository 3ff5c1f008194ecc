"""Sets up the library's logging: level and format from the settings, and the job, rank and generation in every line."""

from __future__ import annotations

import json
import logging
import sys
import threading
import traceback
from typing import Any, Final, TextIO

from ferrorpc.config import Config

ORIGIN_FIELDS: Final = ("job", "rank", "generation")
"""Attributes of a log record that say where it comes from. A record without them (`extra`) gets those of this process."""
_origin: dict[str, Any] = {}
_telling = threading.local()
_logger: Final = logging.getLogger("ferrorpc")
_level = logging.NOTSET
"""The level that `set_up_logging` gave last."""


def set_log_origin(job: str, rank: int, generation: int) -> None:
    """Sets the origin of this process's log lines from now on."""
    _origin.update(job=job, rank=rank, generation=generation)


def clear_log_origin(job: str) -> None:
    """This process's log lines name no origin from now on, unless it has joined another job since."""
    if _origin.get("job") == job:
        _origin.clear()


def escape_unprintable(text: str) -> str:
    """The text with unprintable characters, line ends included, as escapes. So text from other processes can neither pass for a
    log line of this one nor control the terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else character.encode("unicode_escape").decode() for character in text)


def set_up_logging(config: Config) -> None:
    """Sets level and format of the loggers `ferrorpc.*`. Their handler is silent once the program sets up logging itself.

    A level that the program has given them stays, unless the setting is given too.
    """
    global _level
    root = logging.root
    if _logger.level in (logging.NOTSET, _level) or config.source("log_level") != "default":
        if logging.getLevelName(_logger.level) != config["log_level"]:  # Ctrl-C in setLevel may leave logging's lock locked
            _logger.setLevel(config["log_level"])
        _level = _logger.level
    if not _logger.handlers and not root.handlers:
        added = _StandardErrorHandler()
        added.addFilter(lambda _record: not root.handlers)  # those get the record as well
        _logger.addHandler(added)
    for handler in _logger.handlers:
        if isinstance(handler, _StandardErrorHandler):
            handler.setFormatter(JsonFormatter() if config["log_format"] == "json" else TextFormatter())


def tell(log: logging.Logger, level: int, text: str, *values: object, traceback_too: bool = False) -> None:
    """Logs in the midst of an operation, or on a thread of the library, where the program's handlers must disturb nothing.

    What they raise is shown as logging shows it. What is logged here while they use the group would come to them again, and is
    dropped.

    Args:
        traceback_too: with the traceback of the exception that is being handled.
    """
    if getattr(_telling, "now", False):
        return
    _telling.now = True
    try:
        log.log(level, text, *values, exc_info=traceback_too, stacklevel=2)
    except Exception:  # noqa: BLE001  a handler's
        if logging.raiseExceptions:
            traceback.print_exc()
    finally:
        _telling.now = False


class _StandardErrorHandler(logging.StreamHandler[TextIO]):
    """Writes to what is sys.stderr at each record, as `logging.lastResort` does. Test runners and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _origin_of(record: logging.LogRecord) -> dict[str, Any]:
    """The ORIGIN_FIELDS of a record. If a record names its job, those of this process do not apply."""
    own = record.__dict__ if "job" in record.__dict__ else _origin
    return {name: own[name] for name in ORIGIN_FIELDS if own.get(name) is not None}


class TextFormatter(logging.Formatter):
    """Time, level, logger and origin, then the message, whose further lines are indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(where)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, or more with an exception."""
        where = " ".join(f"{name}={value}" for name, value in _origin_of(record).items())
        record.where = f" [{where}]" if where else ""
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The first part of `format`, before an exception."""
        record.message = "\n    ".join(map(escape_unprintable, record.message.split("\n")))
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object with time (seconds since the epoch), level, logger, origin and message."""
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            **_origin_of(record),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
