"""PyTorch's side of ferrorpc: `pip install ferrorpc[torch]`. The names below are what it offers."""

from importlib.util import find_spec as _find_spec

if _find_spec("torch") is None:  # an ImportError, so that `try: import ferrorpc.torch` works as with other packages
    raise ModuleNotFoundError(
        "ferrorpc.torch needs PyTorch, which is not installed\ntry: pip install 'ferrorpc[torch]'", name="torch"
    )

from ferrorpc.torch.cut import cut as cut
from ferrorpc.torch.data_parallel import DistributedDataParallel as DistributedDataParallel
from ferrorpc.torch.stage import Stage as Stage, with_gradient as with_gradient
from ferrorpc.torch.zero import ZeroOptimizer as ZeroOptimizer

__all__ = ["DistributedDataParallel", "Stage", "ZeroOptimizer", "cut", "with_gradient"]
