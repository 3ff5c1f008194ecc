"""`ferrorpc demo`: runs examples/digits_ddp.py on several processes, from an installed package or from a clone."""

from __future__ import annotations

import shlex
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import click

from ferrorpc.cli.launcher.worker_group import FailurePolicy
from ferrorpc.cli.run import run_alone
from ferrorpc.cli.system import own_command
from ferrorpc.errors import ConfigError

_SCRIPT: Final = "digits_ddp.py"
_HERE: Final = Path(__file__).resolve().parent
_PLACES: Final = (_HERE / "_examples", _HERE.parents[1] / "examples")
"""Where the examples are in a wheel, and in a clone."""
_NEEDED: Final = {"sklearn": "scikit-learn", "tqdm": "tqdm", "matplotlib": "matplotlib"}


@click.command("demo")
@click.option("-n", "--nproc", "processes", type=click.IntRange(min=1), default=4, show_default=True, help="Processes.")
@click.option("--epochs", type=click.IntRange(min=1), default=20, show_default=True, help="Passes over the data.")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Fixes the data split, the batches and the weights.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default=Path("out/digits_loss.png"),
    show_default=True,
    help="File of the loss curve.",
)
def command(processes: int, epochs: int, seed: int, out: Path) -> int:
    """Train a small network on handwritten digits, data-parallel, and draw its loss.

    Runs a complete job: a coordinator, a launcher, and four processes that average their gradients. The data comes with
    scikit-learn; nothing is downloaded.
    """
    script = find_script()
    check_packages()
    check_picture(out)
    flags = ("--epochs", str(epochs), "--seed", str(seed), "--out", str(out))
    click.echo(f"{own_command()} run -n {processes} {shlex.join((_SCRIPT, *flags))}")
    # SIGTERM instead of SIGINT: on Ctrl-C the demo should not print a traceback for each rank.
    code = run_alone((str(script), *flags), processes, policy=FailurePolicy(interrupt_number=signal.SIGTERM))
    if code == 0:
        click.echo(f"next: {own_command()} run -n 4 train.py, with a script of your own, such as README.md has")
    return code


def find_script() -> Path:
    """The demo's script.

    Raises:
        ConfigError: this installation has no examples.
    """
    for place in _PLACES:
        if (place / _SCRIPT).is_file():
            return place / _SCRIPT
    raise ConfigError(f"{_SCRIPT} is neither in {_PLACES[0]} nor in {_PLACES[1]}", hint="install ferrorpc again")


def check_picture(path: Path) -> None:
    """Raises ConfigError or OSError where the training would end without its picture. Makes the directory of it."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix and path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"--out {path}: matplotlib draws no {path.suffix[1:]}", hint=f"end it with one of {', '.join(formats)}"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    path.open("ab").close()
    if is_new:
        path.unlink()


def check_packages() -> None:
    """Raises ConfigError naming the packages that the demo needs and that are not installed."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}", hint='pip install "ferrorpc[examples]"')
