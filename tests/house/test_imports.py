"""Every module can be imported, `import ferrorpc` is light, and no process loads what it has no business with."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.house.tree import COORDINATOR_MAY_IMPORT, module_of, package_files

HEAVY = ("grpc", "torch", "cupy", "starlette", "uvicorn", "aiohttp", "rich", "matplotlib", "sklearn", "prometheus_client")
OPTIONAL = {"torch", "cupy", "starlette", "uvicorn", "rich", "psutil", "nccl", "cryptography"}
"""Third-party packages of extras: a module of ours that needs one may be without it where it is not installed."""


def test_every_module_can_be_imported() -> None:
    for name in [module_of(path) for path in package_files() if path.name != "__main__.py"]:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in OPTIONAL:
                raise


def loaded_after(statement: str) -> list[str]:
    """Names in sys.modules of a fresh interpreter after one statement."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    names: list[str] = json.loads(result.stdout)
    return names


def test_importing_the_library_loads_no_heavy_package() -> None:
    before = set(loaded_after("pass"))
    after = set(loaded_after("import ferrorpc"))
    assert sorted(name for name in after if name.split(".")[0] in HEAVY) == []
    assert sorted(name for name in after - before if name.startswith("ferrorpc.")) == [], "the face loads its rooms when asked"


def test_importing_the_library_prepares_grpc_and_leaves_a_level_that_is_set() -> None:
    code = "import os, ferrorpc; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], os.environ['GRPC_VERBOSITY'])"
    unset = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    for environment, expected in ((unset, "0 ERROR"), (unset | {"GRPC_VERBOSITY": "DEBUG"}, "0 DEBUG")):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
        assert (result.stdout.strip(), result.stderr) == (expected, "")


def test_grpc_imported_before_the_library_is_warned_of_once_unless_its_fork_support_is_off() -> None:
    code = "import grpc, ferrorpc, importlib; importlib.import_module('ferrorpc')"
    unset = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    for environment, warnings in ((unset, 1), (unset | {"GRPC_ENABLE_FORK_SUPPORT": "0"}, 0)):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
        assert result.stderr.count("grpc was imported before ferrorpc") == warnings, result.stderr


def test_the_face_answers_dir_without_loading_anything() -> None:
    assert sorted(set(loaded_after("import ferrorpc; dir(ferrorpc)")) & set(HEAVY)) == []


def modules_of_a_running_coordinator(tmp_path: Path) -> set[str]:
    """What `python -m ferrorpc_coordinator` imported from its start to a clean end, read off -X importtime."""
    log = tmp_path / "imports"
    command = [sys.executable, "-X", "importtime", "-m", "ferrorpc_coordinator", "--listen", "127.0.0.1:0"]
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ})
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening ")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
            process.communicate()
    return set(re.findall(r"^import time:.*\|\s*(\S+)$", log.read_text(), re.MULTILINE))


def test_the_coordinator_never_loads_the_training_side(tmp_path: Path) -> None:
    modules = modules_of_a_running_coordinator(tmp_path)
    assert "ferrorpc_coordinator.server" in modules, "the list is complete enough to be believed"
    rooms = {name.split(".")[1] for name in modules if name.startswith("ferrorpc.")}
    assert rooms <= COORDINATOR_MAY_IMPORT
    assert {name for name in modules if name.split(".")[0] in ("torch", "cupy", "sklearn", "matplotlib")} == set()


def test_a_process_without_a_gpu_loads_nothing_of_the_backends_for_gpus() -> None:
    loaded = loaded_after("import ferrorpc; ferrorpc.init_process_group")
    assert "ferrorpc.backends.registry" in loaded
    rooms = tuple(f"ferrorpc.backends.{room}" for room in ("device", "nccl", "cuda_ipc", "hybrid"))
    assert [name for name in loaded if name.startswith(rooms)] == []
