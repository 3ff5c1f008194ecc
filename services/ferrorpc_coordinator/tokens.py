"""A coordinator's file of tokens, read anew when it is replaced, so that tokens can be changed without a restart."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from ferrorpc.errors import ConfigError
from ferrorpc_coordinator.state.access import Access, Grant, read_grants

POLL_SECONDS: Final = 1.0
_log = logging.getLogger("ferrorpc.coordinator")


def read_token_file(path: Path) -> tuple[Grant, ...]:
    """What the file says.

    Raises:
        ConfigError: it cannot be read, or is not what such a file is. It tells no token.
    """
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in ASCII"
        raise ConfigError(f"the token file {path} cannot be read: {reason}", hint="check FERRORPC_TOKEN_FILE") from None
    return read_grants(text)


class TokenFile:
    """Keeps `access` as the file says. One that cannot be used changes nothing, and is told of once."""

    def __init__(self, path: Path, access: Access) -> None:
        self._path = path
        self._access = access
        self._reported = ""

    async def watch(self) -> None:
        """Looks every POLL_SECONDS until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Takes over what is new."""
        try:
            grants = read_token_file(self._path)
        except ConfigError as error:
            if error.message != self._reported:
                self._reported = error.message
                _log.warning("the tokens in use are kept: %s", error.message)
            return
        self._reported = ""
        if self._access.replace(grants):
            _log.warning("%s was read anew: %d tokens", self._path, len(grants))
