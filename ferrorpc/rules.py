"""The module `ferrorpc.ddp.rules` under its public name, so that `from ferrorpc.rules import Adam` works."""

import sys as _sys

from ferrorpc.ddp import rules as _rules
from ferrorpc.ddp.rules import *  # noqa: F403  for type checkers

_sys.modules[__name__] = _rules
