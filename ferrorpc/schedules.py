"""The module `ferrorpc.pipeline.schedules` under its public name, so that `from ferrorpc.schedules import zbv` works."""

import sys as _sys

from ferrorpc.pipeline import schedules as _schedules
from ferrorpc.pipeline.schedules import *  # noqa: F403  for type checkers

_sys.modules[__name__] = _schedules
