"""Exit codes with a meaning for schedulers, scripts and the launcher."""

from __future__ import annotations

from typing import Final

EXIT_CONFIG: Final = 64
"""Bad configuration: retrying cannot help."""
EXIT_RETRY: Final = 75
"""The membership or the coordinator was lost through no fault of this process: a retry can succeed."""
EXIT_INTERRUPTED: Final = 130
"""128 + SIGINT."""
EXIT_PIPE: Final = 141
"""128 + SIGPIPE."""
