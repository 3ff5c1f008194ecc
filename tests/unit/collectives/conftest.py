"""What several tests of collectives in shared memory need."""

from __future__ import annotations

import pytest

from ferrorpc.collectives.arena import all_reduce


@pytest.fixture
def small_chunks(monkeypatch):
    """So that arrays of a few hundred bytes take the large form, in several chunks."""
    monkeypatch.setattr(all_reduce, "CHUNK_BYTES", 256)
    monkeypatch.setattr("ferrorpc.collectives.arena.select.SLOT_BYTES", 0)
