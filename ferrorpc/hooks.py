"""The module `ferrorpc.ddp.hooks` under its public name, so that `from ferrorpc.hooks import PowerSGD` works."""

import sys as _sys

from ferrorpc.ddp import hooks as _hooks
from ferrorpc.ddp.hooks import *  # noqa: F403  for type checkers

_sys.modules[__name__] = _hooks
