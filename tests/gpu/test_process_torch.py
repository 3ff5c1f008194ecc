"""torch modules on a GPU that processes share: data parallelism and pipelines give what one process gives."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.rank_processes import ranks_of
from tests.gpu.scenarios import FAKE
from tests.gpu.without import skip_without_gpu

if not FAKE:
    skip_without_gpu()
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("torch sees no GPU", allow_module_level=True)
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]


@pytest.mark.parametrize("backend", ["cuda_ipc", "grpc"])
@pytest.mark.parametrize("scenario", ["data_parallel", "pipeline"])
def test_modules_get_the_weights_of_one_process(tmp_path: Path, scenario: str, backend: str) -> None:
    with ranks_of(tmp_path, 2, backend, program="torch_program") as ranks:
        ranks.start_all(scenario)
        ranks.end_all()
