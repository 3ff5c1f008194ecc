"""Exit codes that mean something to whoever starts ferrorpc: schedulers, scripts, the launcher itself."""

from __future__ import annotations

from typing import Final

EXIT_CONFIG: Final = 64
"""Bad configuration: retrying cannot help."""
EXIT_RETRY: Final = 75
"""The membership or the coordinator was lost, and nothing is wrong with this process: a retry can succeed."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT."""
EXIT_PIPE: Final = 141
"""128 + SIGPIPE."""
