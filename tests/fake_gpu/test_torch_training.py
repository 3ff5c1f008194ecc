"""torch modules on fake GPUs, trained in several processes: the bits of one process on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import tests.fake_gpu.torch_gpu  # noqa: F401  # skips all of this where torch takes no such devices
from tests.fake_gpu.trained_model import STEPS, one_process
from tests.integration.launching import run

SIZE = 2


def test_a_module_on_a_gpu_gets_the_weights_of_one_process(tmp_path: Path) -> None:
    """Buckets lie on the GPU, so nothing of a gradient is asked for on the host by torch."""
    result = run(
        "-n",
        str(SIZE),
        "-m",
        "tests.fake_gpu.torch_trainer",
        str(tmp_path / "weights"),
        timeout=100,
        FERRORPC_TRANSPORT="grpc",
    )
    assert result.returncode == 0, result.stderr
    expected = one_process(SIZE, "cpu")
    first, second = (dict(np.load(tmp_path / f"weights.{rank}.npz")) for rank in range(SIZE))
    assert first["waits"] == second["waits"] == 0
    for name, weights in expected.items():
        assert first[name].tobytes() == second[name].tobytes() == weights.tobytes(), name
    assert first["1.batches"] == second["1.batches"] == STEPS
    assert first["1.total"] == second["1.total"] != 0, "rank 0's"
