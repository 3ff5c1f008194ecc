"""NCCL in processes of their own, of which it takes one a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ferrorpc.backends.nccl.cupy_nccl import MODULE, open_cupy_nccl
from ferrorpc.backends.nccl.nccl4py import open_nccl4py
from ferrorpc.errors import BackendUnavailableError
from tests.gpu.rank_processes import ranks_of
from tests.gpu.scenarios import FAKE
from tests.gpu.without import skip_without_gpu

if not FAKE:
    skip_without_gpu()
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(60)]
BINDINGS = {"nccl4py": open_nccl4py, MODULE: open_cupy_nccl}


@pytest.mark.parametrize("binding", BINDINGS)
@pytest.mark.parametrize("backend", ["nccl", "hybrid"])
def test_a_group_of_one_works_by_either_binding(tmp_path: Path, backend: str, binding: str) -> None:
    options: dict[str, object] = {"turns": 2}
    if not FAKE:
        try:
            BINDINGS[binding]()
        except BackendUnavailableError as error:
            pytest.skip(error.reason)
        options["binding"] = binding
    with ranks_of(tmp_path, 1, backend, program="nccl_program") as ranks:
        ranks.start_all("alone", **options)
        ranks.end_all()


@pytest.mark.parametrize("backend", ["nccl", "hybrid"])
def test_a_process_ends_in_order_while_many_communicators_are_being_freed(tmp_path: Path, backend: str) -> None:
    with ranks_of(tmp_path, 1, backend, program="nccl_program") as ranks:
        ranks.start_all("leaving", count=8)
        ranks.end_all()


@pytest.mark.parametrize("backend", ["nccl", "hybrid"])
def test_two_ranks_on_one_gpu_are_named_before_nccl_is_called(tmp_path: Path, backend: str) -> None:
    with ranks_of(tmp_path, 2, backend, program="nccl_program") as ranks:
        ranks.start_all("refused")
        ranks.end_all()
