"""Generates ferrorpc/v1 from protos/ with a pinned, isolated grpcio-tools, or checks that it is fresh.

    python scripts/protos.py            write ferrorpc/v1
    python scripts/protos.py --check    compare with what is committed; exit 1 and print a diff when it differs

The generator is older than the runtime on purpose: code from grpcio-tools 1.76.0 loads on protobuf 6.31 to 7.x, code from a
newer one refuses older runtimes. It lives in its own virtual environment, never beside the project's dependencies.
"""

from __future__ import annotations

import difflib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TOOLS = ("grpcio-tools==1.76.0", "mypy-protobuf==3.7.0", "setuptools<81")
ENVIRONMENT = ROOT / ".venv" / "protos-1.76.0"
SERVICES = ("session.proto", "transport.proto")


def generator() -> Path:
    """The Python of the generator's environment, made at first use."""
    python = ENVIRONMENT / "bin" / "python"
    done = ENVIRONMENT / "complete"
    if not done.exists():
        print(f"making the generator's environment ({', '.join(TOOLS)}) ...", flush=True)
        venv.create(ENVIRONMENT, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", *TOOLS], check=True)
        done.touch()
    return python


def generate(target: Path) -> None:
    """Writes the package ferrorpc/v1 below `target`."""
    python = generator()
    path = {"PATH": f"{ENVIRONMENT / 'bin'}:/usr/bin:/bin"}
    protos = sorted(p.relative_to(PROTOS).as_posix() for p in PROTOS.rglob("*.proto"))
    services = [name for name in protos if name.rsplit("/", 1)[-1] in SERVICES]
    base = [python, "-m", "grpc_tools.protoc", f"-I{PROTOS}"]
    subprocess.run([*base, f"--python_out={target}", f"--mypy_out=quiet:{target}", *protos], check=True, env=path)
    subprocess.run([*base, f"--grpc_python_out={target}", f"--mypy_grpc_out=quiet:{target}", *services], check=True, env=path)
    (target / "ferrorpc" / "v1" / "__init__.py").touch()


def contents(package: Path) -> dict[str, list[str]]:
    """Every generated file's lines, by name."""
    return {p.name: p.read_text().splitlines() for p in sorted(package.glob("*.py*")) if p.suffix in (".py", ".pyi")}


def main() -> int:
    """Entry point."""
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = contents(Path(scratch) / "ferrorpc" / "v1"), contents(ROOT / "ferrorpc" / "v1")
    differs = False
    for name in sorted(fresh | committed):
        diff = list(
            difflib.unified_diff(
                committed.get(name, []), fresh.get(name, []), f"committed/{name}", f"fresh/{name}", lineterm=""
            )
        )
        differs = differs or bool(diff)
        print("\n".join(diff[:40]), end="\n" if diff else "")
    print("ferrorpc/v1 is stale: run `make protos`" if differs else "ferrorpc/v1 is fresh")
    return 1 if differs else 0


if __name__ == "__main__":
    raise SystemExit(main())
