"""PyTorch's side of ferrorpc: `pip install ferrorpc[torch]`. The names below are what it offers."""

from ferrorpc.torch.data_parallel import DistributedDataParallel as DistributedDataParallel

__all__ = ["DistributedDataParallel"]
