"""The token with which a process authenticates itself, from a file that may be replaced while the process runs."""

from __future__ import annotations

import hmac
import logging
import os
import threading
from pathlib import Path
from typing import Final

from ferrorpc.errors import ConfigError

_log = logging.getLogger("ferrorpc.token")


class Token:
    """A token that is read from its file whenever it is needed. It never appears in a repr.

    Args:
        path: None for no token, or for a constant one.
        fixed: the constant one.

    Raises:
        ConfigError: the file cannot be read, or is a coordinator's list of tokens.
    """

    def __init__(self, path: str | None = None, *, fixed: str = "") -> None:
        self._path = path
        self._value = fixed if path is None else read_token(path)
        self._before = self._value
        self._told = ""
        self._lock = threading.Lock()

    @property
    def may_change(self) -> bool:
        """Whether it comes from a file."""
        return self._path is not None

    def current(self) -> str:
        """The current token. Where the file cannot be used, the last token is kept, and that is logged once."""
        return self.both()[0]

    def both(self) -> tuple[str, str]:
        """The current token, and the one before it; the same one twice until the file is replaced."""
        with self._lock:
            told = self._read_anew()
            both = self._value, self._before
        if told:  # without the lock, which a log handler may need
            _log.warning("%s", told)
        return both

    def _read_anew(self) -> str:
        """Returns what is to be logged of it; empty for nothing."""
        if self._path is None:
            return ""
        try:
            value = read_token(self._path)
            if not value and self._value:
                raise ConfigError(f"token_file={self._path!r} is empty now")
        except ConfigError as error:
            before, self._told = self._told, error.message
            return "" if error.message == before else f"the token in use is kept: {error.message}"
        self._told = ""
        if value == self._value:
            return ""
        self._before, self._value = self._value, value
        return f"{self._path} was read anew"

    def accepts(self, *given: str) -> bool:
        """Whether one of these is the current token or the one before it. Compares in constant time."""
        texts = [one.encode("utf-8", "replace") for one in given]
        return any(hmac.compare_digest(one.encode(), text) for one in self.both() for text in texts)


NO_TOKEN: Final = Token()
"""The token of processes that have none."""


_PATH_HINT: Final = "FERRORPC_TOKEN_FILE is the path of a file with the token, not the token (`ferrorpc config` shows it)"


def is_shown(path: str) -> bool:
    """Whether the path of a token file may be shown in a message. What leads nowhere may be a token, given by mistake."""
    return os.path.isabs(path) or os.path.exists(path) or os.path.isdir(os.path.dirname(path))


def read_token(path: str | None) -> str:
    """The token in a file; empty without a path.

    Raises:
        ConfigError: the file cannot be read, or is a coordinator's list of tokens.
    """
    words = [] if path is None else _words(path)
    if len(words) > 1:
        raise ConfigError(
            f"token_file={path!r} lists several tokens or their roles, as only a coordinator's may",
            hint="give this process a file with the one token that it brings; commands such as `ferrorpc status` need the "
            "settings of an observer or a worker, not the coordinator's",
        )
    return "".join(words)


def is_list(path: str) -> bool:
    """Whether a file lists several tokens or their roles, as a coordinator's may. Raises ConfigError if it cannot be read."""
    return len(_words(path)) > 1


def _words(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in ASCII"
        what = f"token_file={path!r}" if is_shown(path) else "token_file"
        raise ConfigError(f"{what} cannot be read: {reason}", hint=_PATH_HINT) from None
