"""How the library's log lines look, as the settings log_level and log_format say."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any


def set_up_logging(config: Mapping[str, Any]) -> None:
    """Gives the loggers `ferrorpc.*` their level, and a handler where the program has not set up logging itself."""
    logger = logging.getLogger("ferrorpc")
    logger.setLevel(config["log_level"])
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if config["log_format"] == "json" else logging.Formatter(_TEXT))
    logger.addHandler(handler)


_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as an object with time (seconds since the epoch), level, logger and message."""
        entry: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)
