"""Sends gradient matrices as products of two thin ones.

Idea. A gradient matrix M (rows x columns) is close to one of low rank r. With a common matrix Q (columns x r) each rank
computes P = M Q; the sum of all P is orthogonalised; each rank computes Q = M^T P; their sum is the new Q, and P Q^T
approximates the sum of all M. The Q of one step is the start of the next (one power iteration per step), so it follows the
gradient. Gradients that are no matrices, or would not shrink at least by half, are sent uncompressed together with the P.

Source. Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019.

Cost: (rows + columns) r values in two messages instead of rows x columns in one; 3 rows x columns x r multiplications, 4 with
error feedback. P Q^T is added up from outer products, element by element, so that ranks with different processors or
matrix libraries still get the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final

import numpy as np

from ferrorpc.ddp.bucket import between
from ferrorpc.ddp.bucket_collectives import BucketCollectives
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.ddp.hooks.base import Exchange, Hook, Part, PlainAllReduce, check_hook, check_state, run_exchange
from ferrorpc.errors import UsageError
from ferrorpc.operations.stream import Stream
from ferrorpc.work import Work

RANK_MAX: Final = 4
_PREFIX = "q/"
_FACTORS = "factors/"
"""The prefix of the state of the hook for the factors."""
_LEAST_SAVING = 2
_TINY = np.float32(1e-30)
_DEPENDENT = np.float32(1e-5)
"""If no more than this share of a column is left without its projections, that is rounding error."""


class PowerSGD(Hook):
    """Approximates matrices by factors of rank `rank` (1 to 4). Meant for use inside `ErrorFeedback`.

    Args:
        hook: how the factors and uncompressed gradients are summed; None for a plain all_reduce.
    """

    def __init__(self, rank: int = 1, hook: Hook | None = None) -> None:
        if rank not in range(1, RANK_MAX + 1):
            raise UsageError(f"rank={rank!r} is not 1 to {RANK_MAX}", hint="1 or 2 is enough for most models")
        self._rank = int(rank)  # 2.0 is in the range, too
        self._hook = PlainAllReduce() if hook is None else check_hook(hook)
        self.operations = 2 * self._hook.operations
        self._starts: dict[str, Array] = {}

    def serve(self, stream: Stream, keys: Iterable[str]) -> None:
        super().serve(stream, keys)
        self._hook.serve(stream, keys)
        self._starts = self._current(self._starts)

    @property
    def text(self) -> str:
        return f"power sgd(rank {self._rank}, {self._hook.text})"

    def exchange(self, part: Part, collectives: BucketCollectives) -> Exchange:
        values, rank = part.values, self._rank
        chosen = [each for each in part.matrices if (each[1] + each[2]) * rank * _LEAST_SAVING <= each[1] * each[2]]
        matrices = [values[start : start + rows * columns].reshape(rows, columns) for start, rows, columns in chosen]
        keys = [f"{part.key}/{start}" for start, _, _ in chosen]
        rest = _outside(values, chosen)
        thin = [_product(matrix, self._start(key, matrix.shape[1])) for key, matrix in zip(keys, matrices, strict=True)]
        sums, sent_rest = yield from self._sum(f"{part.key}/p", [*rest, *thin], part, collectives)
        bases = [_orthogonal(flat.reshape(-1, rank)) for flat in sums[len(rest) :]]
        own = [_product(matrix.T, basis) for matrix, basis in zip(matrices, bases, strict=True)]
        qs, sent_qs = yield from self._sum(f"{part.key}/q", own, part, collectives)
        for run, summed in zip(rest, sums, strict=False):
            run[...] = summed
        for key, matrix, basis, flat in zip(keys, matrices, bases, qs, strict=True):
            q = flat.reshape(-1, rank)
            _expand(basis, q, matrix)
            self._starts[key] = _next_start(key, q)
        if not part.wants_delivered:
            return None
        delivered = np.empty_like(values)
        for run, sent in zip(_outside(delivered, chosen), sent_rest, strict=False):
            run[...] = sent
        for (start, rows, columns), basis, sent in zip(chosen, bases, sent_qs, strict=True):
            _expand(basis, sent.reshape(-1, rank), delivered[start : start + rows * columns].reshape(rows, columns))
        return delivered

    def _sum(
        self, key: str, arrays: list[Array], of: Part, collectives: BucketCollectives
    ) -> Generator[Work[Any], Any, tuple[list[Array], list[Array]]]:
        """The flat sums of a part's arrays over all ranks, by one exchange, and what was delivered of this rank's arrays."""
        if not arrays:
            return [], []
        message = np.concatenate([array.reshape(-1) for array in arrays])
        factors = Part(key, message, wants_delivered=of.wants_delivered, weight=of.weight)
        delivered = yield from run_exchange(self._hook, factors, collectives)
        cuts = np.cumsum([array.size for array in arrays])[:-1]
        return np.split(message, cuts), [] if delivered is None else np.split(delivered, cuts)

    def _start(self, key: str, columns: int) -> Array:
        start = self._starts.get(key)
        if start is None:
            start = self._starts[key] = _random(key, columns, self._rank)
        if start.shape != (columns, self._rank):
            message = f"{_PREFIX}{key} has shape {start.shape}, but ({columns}, {self._rank}) is needed"
            raise UsageError(message, hint="is it another hook's, such as a PowerSGD of another rank?")
        return start

    def state(self) -> dict[str, Array]:
        starts = {_PREFIX + key: start.copy() for key, start in self._starts.items()}
        return starts | {_FACTORS + name: array for name, array in self._hook.state().items()}

    def load_state(self, state: Mapping[str, Array]) -> None:
        check_state(state)
        own = {name for name in state if name.startswith(_PREFIX)}
        self._hook.load_state({name.removeprefix(_FACTORS): array for name, array in state.items() if name not in own})
        self._starts = self._current({name.removeprefix(_PREFIX): np.array(state[name], np.float32) for name in own})


def _outside(values: Array, chosen: list[tuple[int, int, int]]) -> list[Array]:
    """The runs of values between these matrices."""
    runs = [(start, start + rows * columns) for start, rows, columns in chosen]
    return [values[start:stop] for start, stop in between(runs, 0, values.size)]


def _random(key: str, columns: int, rank: int) -> Array:
    """The first Q, the same on every rank."""
    return np.random.default_rng(zlib.crc32(key.encode())).standard_normal((columns, rank)).astype(np.float32)


def _next_start(key: str, q: Array) -> Array:
    """The next step's start: Q with random columns for those that are zero or not finite, which would stay so. Its columns have
    the scale of 1, so that products with them have the next gradient's; powers of two as factors round nothing."""
    lengths = np.abs(q).sum(axis=0)
    lost = ~(np.isfinite(lengths) & (lengths > _TINY))
    if lost.any():
        q = np.where(lost, _random(key, *q.shape), q)
    _, exponents = np.frexp(np.abs(q).max(axis=0))
    return np.ascontiguousarray(np.ldexp(q, -exponents))


def _product(left: Array, right: Array) -> Array:
    """left @ right; its bits may differ between ranks."""
    with np.errstate(all="ignore"):
        return np.asarray(left @ right)


def _orthogonal(p: Array) -> Array:
    """Orthonormalises the columns of P by the modified Gram-Schmidt process. Columns that depend on earlier ones become zeros,
    as where a gradient has a lower rank than P.

    Projections are taken out twice: where they were most of a column, rounding errors are a large part of what is left, and are
    not orthogonal to the other columns. "Twice is enough": Giraud, Langou and Rozloznik, 2005.

    It uses NumPy's own sums, not a matrix library's, so equal P have equal results on every machine.
    """
    columns = [np.ascontiguousarray(column) for column in p.T]
    with np.errstate(all="ignore"):
        for index, column in enumerate(columns):
            largest = np.abs(column).max(initial=0)
            if largest == 0:
                continue
            column /= largest  # so that no square underflows or overflows
            length = _length(column)
            for _ in range(2):
                for other in columns[:index]:
                    column -= (column * other).sum() * other
                left = _length(column)
                column /= np.inf if left <= _DEPENDENT * length else left
                length = np.float32(1)
    return np.stack(columns, axis=1)


def _length(column: Array) -> np.float32:
    length: np.float32 = np.sqrt((column * column).sum())
    return length


def _expand(basis: Array, q: Array, out: Array) -> None:
    """out[:] = basis @ q.T, each element added up in the order of columns."""
    with np.errstate(all="ignore"):
        np.multiply.outer(basis[:, 0], q[:, 0], out=out)
        for index in range(1, q.shape[1]):
            out += np.multiply.outer(basis[:, index], q[:, index])
