"""Checks arguments of ferrorpc.torch."""

from __future__ import annotations

from typing import Any

import torch

from ferrorpc.errors import UsageError


def checked_module(module: Any) -> torch.nn.Module:
    """Returns the module.

    Raises:
        UsageError: it is no torch module.
    """
    if isinstance(module, torch.nn.Module):
        return module
    hint = "pass a torch.nn.Module"
    if isinstance(module, type):
        module, hint = module.__name__, f"pass an instance of it: {module.__name__}(...)"
    elif isinstance(module, list | tuple):
        hint = "put several into one, such as torch.nn.ModuleList or Sequential"
    elif hasattr(module, "named_parameters"):
        hint += "; ferrorpc.DistributedDataParallel and ferrorpc.Pipeline take models and stages without torch"
    raise UsageError(f"module={module!r} is no torch module", hint=hint)
