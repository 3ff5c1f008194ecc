"""Processes that share one GPU capture CUDA graphs while their operations are in flight."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.rank_processes import ranks_of
from tests.gpu.scenarios import FAKE
from tests.gpu.without import skip_without_gpu

if not FAKE:
    skip_without_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


@pytest.mark.parametrize("backend", ["cuda_ipc", "grpc"])
@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_graphs_of_other_work_are_captured_and_replayed_and_operations_refused(
    tmp_path: Path, library: str, backend: str
) -> None:
    if library == "torch" and (FAKE or not pytest.importorskip("torch").cuda.is_available()):
        pytest.skip("torch sees no GPU")
    with ranks_of(tmp_path, 2, backend, program="capturing_program") as ranks:
        ranks.start_all(f"of_{library}")
        ranks.end_all()
