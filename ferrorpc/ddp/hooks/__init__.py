"""What buckets may travel as, public as `ferrorpc.hooks`: fewer bytes for gradients that are a little wrong.

    hook = ferrorpc.hooks.ErrorFeedback(ferrorpc.hooks.PowerSGD(rank=2))
    sync = ferrorpc.GradientSynchronizer(like, group, hook=hook)

Hooks compose: `ErrorFeedback` takes any of them, `PowerSGD` one for its factors. They work on float32, and on half types
through float32; buckets of other dtypes travel as they are. What a hook remembers is in `hook.state()`, to be saved with the
weights. Weighted gradients travel multiplied by their weights: "f16" overflows where these are large.
"""

from __future__ import annotations

from ferrorpc.ddp.hooks.base import Hook, Part
from ferrorpc.ddp.hooks.compress import Compress
from ferrorpc.ddp.hooks.error_feedback import ErrorFeedback
from ferrorpc.ddp.hooks.power_sgd import PowerSGD
from ferrorpc.ddp.hooks.top_k import TopK

__all__ = ["Compress", "ErrorFeedback", "Hook", "Part", "PowerSGD", "TopK"]
