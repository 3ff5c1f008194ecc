"""PyTorch's side of ferrorpc: `pip install ferrorpc[torch]`. The names below are what it offers."""

from ferrorpc.torch.cut import cut as cut
from ferrorpc.torch.data_parallel import DistributedDataParallel as DistributedDataParallel
from ferrorpc.torch.stage import Stage as Stage, with_gradient as with_gradient

__all__ = ["DistributedDataParallel", "Stage", "cut", "with_gradient"]
