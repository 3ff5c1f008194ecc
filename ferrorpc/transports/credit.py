"""How much may be under way that its receiver has not asked for."""

from typing import Final

CHUNK_BYTES: Final = 1 << 20
"""Messages travel in chunks of this size: far larger ones make gRPC slower, smaller ones cost a header each."""
EAGER_CHUNKS: Final = 4
"""Chunks of a message that may go before its receiver has entered the operation; the rest waits for its grant."""
EAGER_BYTES: Final = EAGER_CHUNKS * CHUNK_BYTES
"""Where in a message the part begins that has to be granted."""
