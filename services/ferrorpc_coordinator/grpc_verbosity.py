"""Lets gRPC log why it refused a TLS handshake: an expired certificate, another authority, none at all.

gRPC reads its log level when it is loaded. ferrorpc sets it to ERROR at import, which is too quiet for this, and child
processes inherit it. So this module is the first import of the coordinator's process, and looks for TLS before flags and
variables are parsed. GRPC_VERBOSITY=NONE still silences gRPC.
"""

from __future__ import annotations

import os
import sys
from typing import Final

USES_TLS: Final = bool(os.environ.get("FERRORPC_TLS_CERT")) or any(word.startswith("--tls-cert") for word in sys.argv[1:])
"""Whether this process is configured for TLS; gRPC logs more only then."""

if USES_TLS and os.environ.get("GRPC_VERBOSITY", "ERROR") == "ERROR":
    os.environ["GRPC_VERBOSITY"] = "INFO"
