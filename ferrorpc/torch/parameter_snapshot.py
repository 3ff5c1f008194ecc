"""Detects that a module's parameters may have changed, without a walk through all of its submodules.

torch reports every registration of a parameter or a module in the process; besides that, each known parameter is looked up in
its dict. Cost: one dict lookup for each parameter. The removal of a whole submodule is not detected; its parameters then get
no gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook, register_module_parameter_registration_hook


class _Registrations:
    """Counts the registrations of parameters and modules in the process from its construction on."""

    def __init__(self) -> None:
        self.count = 0
        register_module_parameter_registration_hook(self._registered)
        register_module_module_registration_hook(self._registered)

    def _registered(self, *_: Any) -> None:
        self.count += 1


_registrations = cache(_Registrations)
"""The only one of the process."""


class ParameterSnapshot:
    """A module's parameters at the time of the last `take`."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._registrations = _registrations()
        self._module = module
        self.take()

    def take(self) -> None:
        """Records the current parameters."""
        self._count = self._registrations.count
        self._parameters = [
            (owner._parameters, name, parameter, parameter is not None and parameter.requires_grad)
            for owner in self._module.modules()
            for name, parameter in owner._parameters.items()
        ]

    def may_differ(self) -> bool:
        """Whether parameters may have been added, replaced, removed, frozen or unfrozen since."""
        return self._count != self._registrations.count or any(
            name not in owner
            or owner[name] is not parameter
            or (parameter is not None and parameter.requires_grad is not trains)
            for owner, name, parameter, trains in self._parameters
        )
