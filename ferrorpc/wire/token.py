"""The secret that a process brings, from a file that may be replaced while it runs."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path
from typing import Final

from ferrorpc.errors import ConfigError

_log = logging.getLogger("ferrorpc.token")


class Token:
    """What the file says, looked at whenever it is needed; in no repr.

    Args:
        path: None for no secret, or for one that stays.
        fixed: the one that stays.

    Raises:
        ConfigError: the file cannot be read, or is a coordinator's list of tokens.
    """

    def __init__(self, path: str | None = None, *, fixed: str = "") -> None:
        self._path = path
        self._value = fixed if path is None else read_token(path)
        self._before = self._value
        self._told = ""

    def current(self) -> str:
        """The secret to bring now. A file that cannot be used leaves it as it was, and is told of once."""
        if self._path is None:
            return self._value
        try:
            value = read_token(self._path)
            if not value and self._value:
                raise ConfigError(f"token_file={self._path!r} is empty now")
        except ConfigError as error:
            if error.message != self._told:
                self._told = error.message
                _log.warning("the token in use is kept: %s", error.message)
            return self._value
        self._told = ""
        if value != self._value:
            self._before, self._value = self._value, value
            _log.warning("%s was read anew", self._path)
        return value

    def accepts(self, given: str) -> bool:
        """Whether it is what the file says, or what it said before that; takes as long whichever it is."""
        text = given.encode("utf-8", "replace")
        now, before = (hmac.compare_digest(one.encode(), text) for one in (self.current(), self._before))
        return now or before


NO_TOKEN: Final = Token()
"""Of processes that bring none."""


def read_token(path: str | None) -> str:
    """The secret in a file; empty without one.

    Raises:
        ConfigError: the file cannot be read, or is a coordinator's list of tokens.
    """
    if path is None:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in ASCII"
        raise ConfigError(f"token_file={path!r} cannot be read: {reason}") from None
    if len(token.split()) > 1:
        raise ConfigError(
            f"token_file={path!r} lists several tokens, as only a coordinator's may",
            hint="give this process a file with the one token that it brings",
        )
    return token
