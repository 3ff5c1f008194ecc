"""ZeroOptimizer for NumPy and CuPy weights: its state is sharded, and each rank updates its own part of the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from ferrorpc.arrays.error_prefix import ErrorPrefix
from ferrorpc.arrays.kinds import spec_of, view, view_out
from ferrorpc.ddp.packing import broadcast_arrays
from ferrorpc.ddp.parameter import is_parameter
from ferrorpc.ddp.placement import check_not_captured, common_gpu, gpus_of
from ferrorpc.ddp.pytree import flatten
from ferrorpc.ddp.rules import Array, Rule
from ferrorpc.ddp.shards import Shards, StepsTaken, check_state_layout, check_state_rank
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.failure import interrupts_told, others_told
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.types import DType, TensorSpec

_DTYPES = (DType.FLOAT32, DType.FLOAT64)
_STEP = "step"
_RANK = "rank"
_LAYOUT = "layout"


class ZeroOptimizer:
    """Updates weights by the mean of the ranks' gradients, with 1/size of the optimizer's state on each rank.

        optimizer = ferrorpc.ZeroOptimizer(weights, group, ferrorpc.rules.Adam(1e-3))
        optimizer.step(grads)    # this rank's own gradients, not averaged before

    Where reductions add in rank order (up to 16 ranks, not over NCCL, not with another algorithm by `FERRORPC_ALGORITHM`), the
    weights have the bits that an unsharded optimizer would compute from the means of all_reduce. Elsewhere roundings differ.

    Args:
        weights: a tree (dicts, lists, tuples, named tuples) of float32 or float64 arrays, which are written in place. Each
            rank's shard of CuPy arrays is copied to the host, which runs the rule and holds its state.
        group: every rank constructs its optimizer at the same point of its program.
        rule: `ferrorpc.rules.SGD` or `Adam`, or your own `Rule`; it must be elementwise.
        bucket_cap_mb: how many MiB a message may hold.
        init_sync: whether to begin with the weights of rank 0. Without it all ranks must hold the same.

    Raises:
        UsageError: weights that cannot be written in place, or share memory; or no rule.
        TensorMismatchError: another dtype; or all weights are on another GPU than the group's.
        CollectiveMismatchError: ranks gave different trees or rules; the message says where they differ.
    """

    def __init__(
        self, weights: Any, group: ProcessGroup, rule: Rule, *, bucket_cap_mb: float = 25, init_sync: bool = True
    ) -> None:
        self._group = group = group_given(group)
        self._weights = flatten(weights)
        self._gpus = gpus_of(self._weights.values())
        specs = [(name, _spec(name, leaf)) for name, leaf in self._weights.items()]
        for name, spec in specs:
            if spec.dtype not in _DTYPES:
                raise TensorMismatchError(
                    f"weights {name!r} are {spec}: this optimizer takes float32 and float64",
                    hint="keep the weights it updates in float32, and round copies of them",
                )
        _check_memory({name: _addresses(name, self._weights[name], spec) for name, spec in specs})
        _check_rule(rule)
        self._rule = rule
        self._shards = Shards(specs, group, bucket_cap_mb, f"rule: {_text(rule)}", common_gpu(self._weights, group))
        self._memory = [[np.zeros_like(shard.weights) for _ in range(rule.slots)] for shard in self._shards.shards]
        self._steps = StepsTaken(group, "load_state")
        if init_sync:
            broadcast_arrays(self._weights, group, 0)

    def __repr__(self) -> str:
        where = f"rank {self._group.rank} of {self._group.size}"
        return f"<ZeroOptimizer of {len(self._weights)} weights by {self._rule!r}, {where}, step {self._steps.count}>"

    def __getstate__(self) -> NoReturn:
        """Refuses: what it holds belongs to this process and its group."""
        raise UsageError("a ZeroOptimizer cannot be copied or pickled", hint="save state(), or gather_state()")

    @property
    def memory_bytes(self) -> int:
        """The size of this rank's optimizer state."""
        return sum(array.nbytes for memory in self._memory for array in memory)

    def step(self, grads: Any) -> None:
        """Updates the weights by the mean of all ranks' gradients. Collective. An error of the rule ends the generation.

        Args:
            grads: a tree with the leaves of the weights; None counts as zeros.

        Raises:
            UsageError: leaves are missing or unknown. Nothing was sent then.
            TensorMismatchError: a leaf's dtype or shape is not that of its weights. Nothing was sent then.
            CollectiveMismatchError: ranks have loaded states of different steps, or some have loaded none; on every rank, in
                the first step.
        """
        with interrupts_told(self._group):
            leaves = self._checked(grads)
            self._steps.agree()
        with others_told(self._group):
            self._shards.reduce(self._weights, leaves)
            with self._steps.next():
                with np.errstate(all="ignore"):
                    for shard, memory in zip(self._shards.shards, self._memory, strict=True):
                        self._rule(shard.weights, shard.gradient, memory, self._steps.count)
                self._shards.gather(self._weights)

    def _checked(self, grads: Any) -> dict[str, Any]:
        leaves = flatten(grads, nones=self._weights)
        if leaves.keys() != self._weights.keys():
            strange = ", ".join(sorted(leaves.keys() ^ self._weights.keys()))
            raise UsageError(f"the gradients are not those of the weights: see {strange}", hint="pass each leaf, or None")
        check_not_captured(self._gpus)
        self._shards.check(leaves)
        return leaves

    def state(self) -> dict[str, Array]:
        """A copy of this rank's optimizer state, to be saved with the weights. Each rank saves its own.

        Raises:
            UsageError: the last step has failed, and no state was loaded since.
        """
        self._steps.check_not_ahead()
        own = {_STEP: np.asarray(self._steps.count), _RANK: np.asarray([self._group.rank, self._group.size])}
        own[_LAYOUT] = np.frombuffer(bytearray(self._shards.layout.encode()), np.uint8)
        return own | {name: array.copy() for name, array in self._named().items()}

    def gather_state(self, root: int = 0) -> dict[str, Array] | None:
        """The whole optimizer state on rank `root`; None elsewhere. Groups of any size can load it. Collective.

        Returns:
            name -> array: "slot0/a/b" is the first state array of the rule for the weights "a/b", in their shape. Arrays
            without elements are left out.

        Raises:
            UsageError: the last step has failed, and no state was loaded since.
        """
        self._steps.check_not_ahead()
        state = {_STEP: np.asarray(self._steps.count)}
        for shard, memory in zip(self._shards.shards, self._memory, strict=True):
            for slot, array in enumerate(memory):
                state.update({f"slot{slot}/{name}": whole for name, whole in shard.assemble(array, root).items()})
        return state if self._group.rank == root else None

    def load_state(self, state: Mapping[str, Array]) -> None:
        """Loads what `state` returned on the same rank of a group of the same size, or `gather_state` in any group.

        Raises:
            UsageError: it is another optimizer's, another rank's, or of a group of another size.
            TensorMismatchError: it has bfloat16, complex numbers, or what is no number.
        """
        if not isinstance(state, Mapping):
            raise UsageError(f"{type(state).__name__} is no state", hint="pass what state() or gather_state() gave")
        if _RANK in state:
            self._load_own(state)
        else:
            self._load_whole(state)
        self._steps.set(int(state[_STEP]))

    def _load_own(self, state: Mapping[str, Array]) -> None:
        check_state_rank(self._group, state[_RANK], "gather_state")
        if _LAYOUT in state:  # states saved before there were layouts have none
            saved = view(state[_LAYOUT]).data.tobytes().decode(errors="replace")
            check_state_layout(saved, self._shards.layout)
        named = self._named()
        _check_arrays(state, {name: array.shape for name, array in named.items()})
        for name, array in named.items():
            array[...] = view(state[name]).data

    def _load_whole(self, state: Mapping[str, Array]) -> None:
        shards, slots = self._shards.shards, range(self._rule.slots)
        shapes = {name: shape for shard in shards for name, shape in shard.shapes.items()}
        _check_arrays(state, {f"slot{slot}/{name}": shape for slot in slots for name, shape in shapes.items()})
        for shard, memory in zip(shards, self._memory, strict=True):
            for slot, array in enumerate(memory):
                shard.extract({name: state[f"slot{slot}/{name}"] for name in shard.shapes}, array)

    def _named(self) -> dict[str, Array]:
        return {
            f"shard{number}/slot{slot}": array
            for number, memory in enumerate(self._memory)
            for slot, array in enumerate(memory)
        }


def _spec(name: str, leaf: Any) -> TensorSpec:
    what = f"weights {name!r}" if name else "weights"
    if is_parameter(leaf) and not hasattr(leaf, "dtype"):
        raise UsageError(f"{what}: {type(leaf).__name__} is no array", hint="pass the arrays themselves: parameter.data")
    with ErrorPrefix(what):
        return spec_of(leaf)


def _check_memory(places: Mapping[str, Array | None]) -> None:
    """Raises UsageError if two weights share elements, such as views of one array. `places` are their addresses."""
    arrays = [(*_bounds(place), name, place) for name, place in places.items() if place is not None]
    overlapping: list[tuple[int, str, Array]] = []
    for start, stop, name, place in sorted(arrays, key=lambda each: each[:2]):
        overlapping = [each for each in overlapping if each[0] > start]
        for _, other, before in overlapping:
            if np.shares_memory(before, place):
                first, second = sorted((other, name), key=list(places).index)
                raise UsageError(
                    f"weights {first!r} and {second!r} share memory, where the update of one would be lost",
                    hint="give what they share once, and the sum of its gradients",
                )
        overlapping.append((stop, name, place))


def _bounds(place: Array) -> tuple[int, int]:
    """The addresses of its first byte and of the byte after its last."""
    first = place.__array_interface__["data"][0]
    ways = [(count - 1) * stride for count, stride in zip(place.shape, place.strides, strict=True)]
    low = first + sum(way for way in ways if way < 0)
    return low, low if place.size == 0 else first + sum(way for way in ways if way > 0) + place.itemsize


def _addresses(name: str, weights: Any, spec: TensorSpec) -> Array | None:
    """As `Out.addresses`. Raises UsageError if the weights cannot be written."""
    try:
        return view_out(weights, spec).addresses
    except UsageError as error:
        text = f"weights {name!r} cannot be updated in place: {error.message}"
        raise UsageError(text, hint="give the optimizer arrays of your own, such as x.copy()") from None


def _check_arrays(state: Mapping[str, Array], slots: Mapping[str, tuple[int, ...]]) -> None:
    wanted = {_STEP: (), **slots}
    found = {name: getattr(array, "shape", None) for name, array in state.items() if name not in (_RANK, _LAYOUT)}
    strange = [name for name in wanted | found if wanted.get(name) != found.get(name)]
    if strange:
        raise UsageError(
            f"the state is not this optimizer's: see {strange[0]!r}", hint="make the optimizer of the same weights and rule"
        )
    _check_steps(state[_STEP])
    for name in slots:
        with ErrorPrefix(f"{name!r} in the state"):
            dtype = spec_of(state[name]).dtype
            if dtype.is_complex or dtype is DType.BFLOAT16:
                raise TensorMismatchError(f"{dtype.label} is not converted", hint="convert it to float32, or to float64")


def _check_steps(saved: Any) -> None:
    try:
        is_count = saved >= 0 and int(saved) == saved
    except (TypeError, ValueError, OverflowError):
        is_count = False
    if not is_count:
        raise UsageError(f"step={saved!r} in the state is no number of steps", hint="pass what state() or gather_state() gave")


def _text(rule: Rule) -> str:
    """Its repr without addresses, such as a function's, which differ between processes."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(rule))


def _check_rule(rule: Any) -> None:
    if isinstance(rule, type) or not callable(rule) or not isinstance(getattr(rule, "slots", None), int):
        hint = "pass one such as ferrorpc.rules.Adam(1e-3), or a callable object of your own with `slots`, an integer"
        raise UsageError(f"rule={rule!r} is no update rule", hint=hint)
