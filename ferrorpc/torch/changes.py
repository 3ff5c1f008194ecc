"""Whether a module may have other parameters than before, without a walk through all of its modules.

Torch tells when a parameter or a module is registered anywhere in the process, and those that were there are looked for where
they lay. Cost: a look at each of them. What this cannot see is that a whole module was taken away, whose parameters then get no
gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook


class _Registrations:
    """Counts what is registered, in all modules of the process."""

    def __init__(self) -> None:
        self.count = 0
        self._listens = False

    def listen(self) -> None:
        """Begins to count."""
        if not self._listens:
            self._listens = True
            register_module_parameter_registration_hook(self._registered)
            register_module_module_registration_hook(self._registered)

    def _registered(self, *_: Any) -> None:
        self.count += 1


_registrations = _Registrations()


class Changes:
    """What a module's parameters were when this was last told that they are known."""

    def __init__(self, module: torch.nn.Module) -> None:
        _registrations.listen()
        self._module = module
        self.known()

    def known(self) -> None:
        """What is there now was looked at."""
        self._count = _registrations.count
        self._places = [
            (owner._parameters, name, parameter, parameter is not None and parameter.requires_grad)
            for owner in self._module.modules()
            for name, parameter in owner._parameters.items()
        ]

    def may_be(self) -> bool:
        """Whether parameters may have been added, replaced, taken away, frozen or thawed since."""
        return self._count != _registrations.count or any(
            owner.get(name) is not parameter or (parameter is not None and parameter.requires_grad is not trains)
            for owner, name, parameter, trains in self._places
        )
