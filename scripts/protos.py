"""Generates ferrorpc/v1 from protos/ with a pinned, isolated grpcio-tools, or checks that it is fresh.

    python scripts/protos.py            write ferrorpc/v1
    python scripts/protos.py --check    compare with what is committed; exit 1 and print a diff when it differs

The generator is older than the runtime on purpose: code from grpcio-tools 1.76.0 loads on protobuf 6.31 to 7.x, code from a
newer one refuses older runtimes. It lives in its own virtual environment, never beside the project's dependencies.
"""

from __future__ import annotations

import argparse
import difflib
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
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
    if not done.exists() or done.read_text() != "\n".join(TOOLS):
        print(f"making the generator's environment ({', '.join(TOOLS)}) ...", flush=True)
        venv.create(ENVIRONMENT, clear=True)
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
        try:  # without a wheel for this Python, pip would compile for many minutes
            subprocess.run([*pip, "install", "-q", "--only-binary=:all:", *TOOLS], check=True)
        except subprocess.CalledProcessError:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            raise SystemExit(
                f"the generator cannot be installed for Python {version}: pip's reason is above\n"
                "try: make clean, then make protos with an older Python, as in PYTHON=python3.14 make protos"
            ) from None
        done.write_text("\n".join(TOOLS))
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


def write(fresh: Path, package: Path) -> None:
    """Makes the generated files of a package those of a fresh one; files whose proto is gone are removed."""
    for name in contents(package).keys() - contents(fresh).keys():
        (package / name).unlink()
    shutil.copytree(fresh, package, dirs_exist_ok=True)


def differs(fresh: dict[str, list[str]], committed: dict[str, list[str]]) -> bool:
    """Whether any file differs. Prints the beginning of each difference."""
    found = False
    for name in sorted(fresh | committed):
        old, new = committed.get(name, []), fresh.get(name, [])
        diff = list(difflib.unified_diff(old, new, f"committed/{name}", f"fresh/{name}", lineterm=""))
        print("\n".join(diff[:40]), end="\n" if diff else "")
        found = found or bool(diff) or (name in fresh) != (name in committed)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Generates ferrorpc/v1 from protos/.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if what is committed differs")
    check, package = parser.parse_args(arguments).check, ROOT / "ferrorpc" / "v1"
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "ferrorpc" / "v1"
        if not check:
            write(fresh, package)
            return 0
        is_stale = differs(contents(fresh), contents(package))
    print("ferrorpc/v1 is stale: run `make protos`" if is_stale else "ferrorpc/v1 is fresh")
    return int(is_stale)


if __name__ == "__main__":
    raise SystemExit(main())
