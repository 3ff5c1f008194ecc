"""The coordinator's token file, which is read again when it changes, so that tokens can be replaced without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Final

from ferrorpc.errors import ConfigError
from ferrorpc.wire.token import is_shown
from ferrorpc_coordinator.state.access import Access, Grant, read_grants

POLL_SECONDS: Final = 1.0
_log = logging.getLogger("ferrorpc.coordinator")


def read_token_file(path: Path) -> tuple[Grant, ...]:
    """Reads a token file.

    Raises:
        ConfigError: it cannot be read, or has errors. The message contains no token.
    """
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in ASCII"
        what = f"the token file {path}" if is_shown(str(path)) else "the token file"
        raise ConfigError(f"{what} cannot be read: {reason}", hint="check FERRORPC_TOKEN_FILE, which is a path") from None
    return read_grants(text)


class TokenFile:
    """Updates `access` when the token file changes. A file with errors changes nothing, and is logged once."""

    def __init__(self, path: Path, access: Access) -> None:
        self._path = path
        self._access = access
        self._reported = ""

    async def watch(self) -> None:
        """Checks the file every POLL_SECONDS until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            self.reload()

    def reload(self) -> None:
        """Reads the file, and replaces the tokens if they changed."""
        try:
            # To open a FIFO would wait for a writer. What cannot be looked at, which Path's own looks raise, is refused below.
            if os.path.exists(self._path) and not os.path.isfile(self._path):
                raise ConfigError(f"the token file {self._path} is no regular file", hint="check FERRORPC_TOKEN_FILE")
            grants = read_token_file(self._path)
        except ConfigError as error:
            if error.message != self._reported:
                self._reported = error.message
                _log.warning("the tokens in use are kept: %s", error.message)
            return
        self._reported = ""
        if self._access.replace(grants):
            _log.warning("%s was read anew: %d tokens", self._path, len(grants))
