"""Keeps torch.compile out of ferrorpc's own code: it compiles the module, and of a training step what is torch's.

A step that is compiled as a whole calls collectives, hooks of the backward pass and optimizers. Traced into threads and
sockets, they end in failed guards. So the compiler calls them as they are, as it does with NumPy. The wrapper's `forward`
alone is left to it: skipping that would skip the module that it calls, too.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

_LEFT_TO_IT: Final = ("ferrorpc.torch", "ferrorpc.torch.data_parallel")
_OTHERS: Final = ("google.protobuf", "grpc", "weakref")
"""What ferrorpc calls. Traced, weakref's finalizers fail where another thread makes one meanwhile."""


@cache
def hide_from_compiler() -> None:
    """Makes it skip everything of ferrorpc but the wrapper's `forward`.

    This is done at the first construction of something that trains, not at import, because torch.compiler imports a large part
    of torch.
    """
    try:
        from torch._dynamo.trace_rules import add
    except ImportError:  # not public: a torch without it compiles modules and wrappers, but no whole steps
        return
    here = Path(__file__).parent
    for folder, package in ((here.parent, "ferrorpc."), (here, "ferrorpc.torch.")):
        for module in pkgutil.iter_modules([str(folder)], package):
            if module.name not in _LEFT_TO_IT:
                add(module.name)
    for name in _OTHERS:
        add(name)


@cache
def hide_methods(owner: type[Any], *names: str) -> None:
    """Makes the compiler call these methods, of a class that it does not skip, as they are."""
    for name in names:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
