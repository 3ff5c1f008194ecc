"""Measures pipelines that really compute: their idle time beside the simulation's, their steps beside torch's pipelining.

    python -m benchmarks.pipeline [--microbatches 8] [--steps 9] [--unit-ms 20] [--only bubble|torch] [--svg DIR] [--json]

Two processes, with one compute thread each.

*bubble*: stages are matrix products of a calibrated duration, the same for forward, backward of input and backward of weights.
How long a product takes on each rank is measured again right before and after each step. The step's idle share is compared with
that of the schedule's simulation at these durations, without latency; the step with the median difference is shown.

*torch*: one model, with the same weights for both systems. Their steps alternate, ours over the group's transport
(--transport), torch's over Gloo. A step lasts from the start of the first rank to the end of the last. Medians are shown, with
their ratio; the gradients of both are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ferrorpc
from benchmarks.options import amount, count
from ferrorpc import schedules

CHUNKS = {"1f1b": 1, "interleaved": 2, "zbv": 2}
"""The schedules that are measured, with the number of stages on each rank."""
RANKS = 2
ROWS, WIDTH, BLOCKS = 64, 1024, 4
"""Of the model: rows of a microbatch, features, number of blocks."""
PRODUCTS = 100
"""How many products are timed together."""
TOLERANCE = 1e-4
"""The largest relative difference of gradients: both systems add the same numbers, in different orders."""


class Product:
    """A stage of matrix products with a known duration: one unit for each of forward, backward of input and of weights.

    Args:
        repetitions: of the product; they take one unit divided by the chunks of a rank.
    """

    def __init__(self, repetitions: int) -> None:
        self._repetitions = repetitions
        self._matrix = np.random.default_rng(0).standard_normal((192, 192), np.float32)
        self._result = np.empty_like(self._matrix)

    def spend(self, repetitions: int | None = None) -> None:
        for _ in range(self._repetitions if repetitions is None else repetitions):
            np.matmul(self._matrix, self._matrix, out=self._result)

    def forward(self, x: Any) -> tuple[Any, Any]:
        self.spend()
        return x, None

    def backward_input(self, context: Any, grad_y: Any) -> Any:
        self.spend()
        return grad_y

    def backward_weight(self, context: Any, grad_y: Any) -> None:
        self.spend()


def product_seconds(group: ferrorpc.ProcessGroup, rounds: int) -> Any:
    """How long one product takes on each rank while all of them compute; the median of so many rounds."""
    product = Product(1)
    group.barrier()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        product.spend(PRODUCTS)
        times.append((time.perf_counter() - start) / PRODUCTS)
    return np.concatenate(group.all_gather(np.array([statistics.median(times)])))


def bubbles(group: ferrorpc.ProcessGroup, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Recorded and simulated idle shares of all schedules."""
    return [bubble(group, options, name, chunks) for name, chunks in CHUNKS.items()]


def bubble(group: ferrorpc.ProcessGroup, options: argparse.Namespace, name: str, chunks: int) -> dict[str, Any]:
    """Recorded and simulated idle shares of one schedule."""
    schedule = schedules.named(name, RANKS, options.microbatches, chunks)
    repetitions = max(1, round(options.unit_ms / 1e3 / chunks / float(product_seconds(group, 15).mean())))
    pipe = ferrorpc.Pipeline([Product(repetitions) for _ in range(chunks)], group, schedule)
    x = np.zeros((options.microbatches, 1 << 14), np.float32)
    steps = []
    for _ in range(options.steps + 1):
        before = product_seconds(group, 3)
        group.barrier()
        pipe.step(x, x, lambda y, _: (0.0, y))
        recorded = pipe.recorded()
        units = list(repetitions * chunks * (before + product_seconds(group, 3)) / 2)
        steps.append((recorded, schedule.simulate(units, units, units), units))
    steps = sorted(steps[1:], key=lambda step: step[0].bubble_fraction - step[1].bubble_fraction)
    recorded, simulated, units = steps[len(steps) // 2]
    if options.svg and group.rank == 0:
        recorded.to_svg(Path(options.svg) / f"{name}.svg", beside=simulated)
        recorded.to_png(Path(options.svg) / f"{name}.png", beside=simulated)
    return {
        "schedule": str(schedule),
        "unit_ms": [1e3 * each for each in units],
        "bubble_recorded": recorded.bubble_fraction,
        "bubble_simulated": simulated.bubble_fraction,
        "points": 100 * (recorded.bubble_fraction - simulated.bubble_fraction),
        "points_of_steps": [100 * (step[0].bubble_fraction - step[1].bubble_fraction) for step in steps],
        "bubble_equal_ranks": schedule.simulate(1.0, 1.0, 1.0).bubble_fraction,
        "step_ms_recorded": 1e3 * recorded.makespan,
        "step_ms_simulated": 1e3 * simulated.makespan,
    }


def model(seed: int) -> Any:
    """A sequence of blocks, each a small perceptron with layer norm and a residual connection."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(seed)
    return torch.nn.Sequential(*(Block() for _ in range(BLOCKS)))


class FerrorpcPipeline:
    """Trains with ferrorpc's pipeline."""

    def __init__(self, pieces: dict[int, Any], schedule: schedules.Schedule, group: ferrorpc.ProcessGroup, loss: Any) -> None:
        from ferrorpc.torch import Stage, with_gradient

        self.pipe = ferrorpc.Pipeline([Stage(piece) for piece in pieces.values()], group, schedule)
        self._loss = with_gradient(loss)

    def step(self, x: Any, target: Any) -> None:
        self.pipe.step(x, target, self._loss)


class TorchPipeline:
    """Trains with torch.distributed.pipelining."""

    def __init__(self, name: str, pieces: dict[int, Any], schedule: schedules.Schedule, loss: Any) -> None:
        import torch
        from torch.distributed import pipelining

        count, device = schedule.virtual_stages, torch.device("cpu")
        held = [pipelining.PipelineStage(piece, number, count, device) for number, piece in pieces.items()]
        makers: dict[str, Callable[..., Any]] = {
            "1f1b": lambda stages, *rest, **named: pipelining.Schedule1F1B(stages[0], *rest, **named),
            "interleaved": pipelining.ScheduleInterleaved1F1B,
            "zbv": pipelining.ScheduleZBVZeroBubble,
        }
        self._schedule = makers[name](held, schedule.microbatches, loss_fn=loss)
        self._first, self._last = 0 in pieces, count - 1 in pieces

    def step(self, x: Any, target: Any) -> None:
        self._schedule.step(*([x] if self._first else []), target=target if self._last else None, return_outputs=False)


def beside_torch(group: ferrorpc.ProcessGroup, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Step times of both systems, with the same model."""
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    loss = torch.nn.functional.mse_loss
    x = torch.randn(options.microbatches * ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    target = torch.zeros_like(x)
    found = []
    for name, chunks in CHUNKS.items():
        schedule = schedules.named(name, RANKS, options.microbatches, chunks)
        whole = model(seed=0)
        share = BLOCKS // schedule.virtual_stages
        pieces = {number: whole[number * share : (number + 1) * share] for number in schedule.pieces(group.rank)}
        others = copy.deepcopy(pieces)
        ferrorpcs = FerrorpcPipeline(pieces, schedule, group, loss)
        both = {"ours": ferrorpcs, "torch": TorchPipeline(name, others, schedule, loss)}
        times: dict[str, list[float]] = {each: [] for each in both}
        for _ in range(options.steps + 1):
            for each, runs in both.items():
                for piece in (*pieces.values(), *others.values()) if each == "ours" else ():
                    piece.zero_grad()
                group.barrier()
                start = time.monotonic()
                runs.step(x, target)
                times[each].append(_lasted(group, start, time.monotonic()))
        ours, theirs = (statistics.median(times[each][1:]) for each in ("ours", "torch"))
        recorded = ferrorpcs.pipe.recorded()
        found.append(
            {
                "schedule": str(schedule),
                "ours_ms": 1e3 * ours,
                "torch_ms": 1e3 * theirs,
                "ratio": ours / theirs,
                "bubble_recorded": recorded.bubble_fraction,
                "bubble_simulated": schedule.simulate(**recorded.costs(schedule)).bubble_fraction,
                "gradients_apart": _apart(group, pieces, others),
            }
        )
    torch.distributed.destroy_process_group()
    return found


def _lasted(group: ferrorpc.ProcessGroup, start: float, stop: float) -> float:
    times = group.all_gather(np.array([start, stop]))
    return float(max(each[1] for each in times) - min(each[0] for each in times))


def _apart(group: ferrorpc.ProcessGroup, pieces: dict[int, Any], others: dict[int, Any]) -> float:
    """The largest relative difference between the two systems' gradients of a weight. Exits if it is more than rounding."""
    distances = [
        float((mine.grad - theirs.grad).norm() / theirs.grad.norm())
        for number, piece in pieces.items()
        for mine, theirs in zip(piece.parameters(), others[number].parameters(), strict=True)
    ]
    apart = float(group.all_reduce(np.array(max(distances)), op="max"))
    if apart > TOLERANCE:
        raise SystemExit(f"the gradients of the two systems differ by {apart:g}, which is more than rounding")
    return apart


def work(options: argparse.Namespace) -> None:
    """Runs one rank; rank 0 prints."""
    with ferrorpc.init_process_group(transport=options.transport) as group:
        result: dict[str, Any] = {"backend": group.backend, "transport": options.transport, "cores": os.cpu_count()}
        if options.only in (None, "bubble"):
            result["bubble"] = bubbles(group, options)
        if options.only in (None, "torch"):
            result["torch"] = beside_torch(group, options)
        if group.rank == 0:
            print(json.dumps(result, indent=2) if options.json else _shown(result), flush=True)


def _shown(result: dict[str, Any]) -> str:
    lines = [f"{result['backend']} over {result['transport']}, {result['cores']} cores, one thread of compute a rank"]
    for row in result.get("bubble", ()):
        units = ", ".join(f"{each:.1f}" for each in row["unit_ms"])
        lines.append(
            f"  {row['schedule']}: idle {row['bubble_recorded']:.1%}, simulated {row['bubble_simulated']:.1%} "
            f"({row['points']:+.1f} points; all steps {row['points_of_steps'][0]:+.1f} to {row['points_of_steps'][-1]:+.1f}; "
            f"with equal ranks {row['bubble_equal_ranks']:.1%}); units {units} ms; "
            f"step {row['step_ms_recorded']:.0f} ms, simulated {row['step_ms_simulated']:.0f} ms"
        )
    for row in result.get("torch", ()):
        lines.append(
            f"  {row['schedule']}: {row['ours_ms']:.0f} ms, torch over Gloo {row['torch_ms']:.0f}, ratio {row['ratio']:.2f}; "
            f"idle {row['bubble_recorded']:.1%}, simulated at the same costs {row['bubble_simulated']:.1%}; "
            f"gradients {row['gradients_apart']:.1g} apart"
        )
    return "\n".join(lines)


def main() -> None:
    """Starts two ranks; or runs one, if started as a rank."""
    parser = argparse.ArgumentParser(description="compares pipelines with their simulation and with torch's")
    parser.add_argument("--microbatches", type=count, default=8)
    parser.add_argument("--steps", type=count, default=9, help="measured steps, after one warm-up step")
    parser.add_argument("--unit-ms", type=amount, default=20.0, help="a whole rank's forward of one microbatch")
    parser.add_argument("--only", choices=("bubble", "torch"))
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--svg", help="a folder for pictures of recorded and simulated steps")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    environment = {**os.environ, **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")}
    command = [sys.executable, "-m", "ferrorpc", "run", "-n", str(RANKS), "-m", "benchmarks.pipeline", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
