"""Lets gRPC tell why it refused a handshake: an expired certificate, another authority, none at all.

It does so at a level that must be set before it is loaded, and ferrorpc sets a quieter one (ERROR) where it is imported, which
child processes inherit. So this is the first import of the coordinator's process, and looks for TLS before flags and variables
are read. GRPC_VERBOSITY=NONE keeps gRPC silent all the same.
"""

from __future__ import annotations

import os
import sys
from typing import Final

USES_TLS: Final = bool(os.environ.get("FERRORPC_TLS_CERT")) or any(word.startswith("--tls-cert") for word in sys.argv[1:])
"""Whether this process is told to speak TLS; only then gRPC is made to speak of it."""

if USES_TLS and os.environ.get("GRPC_VERBOSITY", "ERROR") == "ERROR":
    os.environ["GRPC_VERBOSITY"] = "INFO"
