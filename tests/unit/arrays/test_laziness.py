"""Telling libraries apart must not import them."""

from __future__ import annotations

import subprocess
import sys


def test_arrays_import_neither_torch_nor_cupy_nor_ml_dtypes():
    script = (
        "import sys, numpy as np; from ferrorpc.arrays.kinds import view, view_out;"
        "v = view(np.zeros(3)); view(1.0); view_out(np.zeros(3), v.spec).commit();"
        "print([name for name in ('torch', 'cupy', 'ml_dtypes') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
