"""Communication hooks, public as `ferrorpc.hooks`: buckets are reduced with fewer bytes, and less accuracy.

    hook = ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.PowerSGD(rank=2))
    sync = ferrorpc.GradientSynchronizer(like, group, hook=hook)

Hooks compose: `ErrorFeedback` takes any hook, `PowerSGD` takes one for its factors. They work on float32, and on half types
through float32; buckets of other dtypes are reduced without them. `hook.state()` is a hook's state, to be saved with the
weights. Weighted gradients are sent multiplied by their weights, so "f16" overflows if weights are large.
"""

from __future__ import annotations

from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.hooks.base import Exchange, Hook, Part
from ferrorpc.ddp.hooks.compress import Compress
from ferrorpc.ddp.hooks.error_feedback import ErrorFeedback
from ferrorpc.ddp.hooks.power_sgd import PowerSGD
from ferrorpc.ddp.hooks.top_k import TopK

__all__ = ["BucketCollectives", "Compress", "ErrorFeedback", "Exchange", "Hook", "Part", "PowerSGD", "TopK"]
