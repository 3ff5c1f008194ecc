"""Each transcript is replayed and must come out word for word.

After a change that is meant: FERRORPC_REWRITE=1 pytest tests/transcripts, and read the difference before committing it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.runner import replay

TRANSCRIPTS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=[path.stem for path in TRANSCRIPTS])
def test_the_transcript_comes_out_as_written(path: Path) -> None:
    fresh = replay(path)
    if os.environ.get("FERRORPC_REWRITE"):
        path.write_text(fresh)
    assert fresh == path.read_text()
