"""Runs a Python module while NVIDIA's Multi-Process Service (MPS) is on, so that its processes use a GPU at the same time.

    python -m benchmarks.gpu.with_mps MODULE [ARGUMENT ...]

Needs nvidia-cuda-mps-control, which comes with the driver. It starts a control daemon of its own and ends it after the module,
whose exit code it returns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

CONTROL = "nvidia-cuda-mps-control"
CONTROL_SECONDS = 20.0
"""How long the daemon may take to start, and to end."""


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs `python -m ARGUMENTS` between start and end of the daemon. Returns the exit code."""
    subprocess.run([CONTROL, "-d"], env=environment, check=True, timeout=CONTROL_SECONDS)
    try:
        return subprocess.run([sys.executable, "-m", *arguments], env=environment, check=False).returncode
    finally:
        subprocess.run([CONTROL], input=b"quit\n", env=environment, check=False, timeout=CONTROL_SECONDS)


def main() -> int:
    """Runs the module that the command line names."""
    if len(sys.argv) < 2:
        raise SystemExit("which module? python -m benchmarks.gpu.with_mps MODULE [ARGUMENT ...]")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        places = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            return run(sys.argv[1:], {**os.environ, **places})
        except FileNotFoundError:
            raise SystemExit(f"needs {CONTROL}, which comes with NVIDIA's driver, on the PATH") from None


if __name__ == "__main__":
    sys.exit(main())
