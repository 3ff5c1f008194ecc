"""ferrorpc called with torch tensors, as code that comes from Gloo does. PyTorch is loaded then, and converts half types."""

from __future__ import annotations

from collections.abc import Mapping

from ferrorpc.cli.bench.runners.ferrorpc import FerrorpcRunner
from ferrorpc.cli.bench.runners.tensors import TensorRunner


class FerrorpcTensorRunner(TensorRunner, FerrorpcRunner):
    """A rank of a group. Setting: transport."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        TensorRunner.__init__(self, settings)
        FerrorpcRunner.__init__(self, settings)
        self.version = f"{self.version}, torch {self._torch.__version__}"
