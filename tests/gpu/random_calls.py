"""Operations drawn from a seed, alike on every rank, and what each must give: the bits of NumPy's left fold in rank order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ferrorpc.group import ProcessGroup
from ferrorpc.operations.stream import Stream
from ferrorpc.testing.reference import check_same, every_dtype, numpy_dtype, operators, reduced, values
from ferrorpc.types import DType

Array = np.ndarray[Any, Any]

NAMES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "complex64", "bool")
DTYPES = tuple(dtype for dtype in every_dtype() if dtype.label in NAMES)
REDUCTIONS = ("all_reduce", "all_reduce", "all_reduce", "reduce", "reduce_scatter")
MOVES = ("broadcast", "gather", "all_gather", "scatter", "all_to_all")
OTHERS = ("around", "streams", "barrier")
ROWS = (0, 1, 1, 7, 1000, 4099, 65_537, 300_001)
LAYOUTS = ("plain", "plain", "offset", "strided", "reversed", "transposed")
DRAWN_MAX = 4099
"""More rows than so many repeat the first. It is a prime number: what is shifted by slots or slices is found all the same."""
SHIFT = 3
PIECES = 3
"""Operations of one call on streams."""


class Placed:
    """A host array within a larger block on the GPU, or on the host, whose other elements have to stay as they are.

    Args:
        layout: one of LAYOUTS.
        on_gpu: else it is on the host.
    """

    def __init__(self, cupy: Any, array: Array, dtype: DType, layout: str, on_gpu: bool) -> None:
        self._shape, self._layout = array.shape, layout
        self._block = values(dtype, self._room(), 99).reshape(self._room())
        self._within(self._block)[...] = array
        self._cupy = cupy if on_gpu else None
        self._made_in = cupy.cuda.get_current_stream()
        self._near = cupy.asarray(self._block) if on_gpu else self._block.copy()
        self.x = self._within(self._near)

    def _room(self) -> tuple[int, ...]:
        rows, *rest = self._shape
        if self._layout == "offset":
            return (rows * int(np.prod(rest, dtype=int)) + 2 * SHIFT + 1,)
        if self._layout == "strided":
            return (2 * rows + 1, *rest)
        return self._shape[::-1] if self._layout == "transposed" else self._shape

    def _within(self, block: Any) -> Any:
        if self._layout == "offset":
            return block[SHIFT : block.shape[0] - SHIFT - 1].reshape(self._shape)
        if self._layout == "strided":
            return block[1::2]
        if self._layout == "reversed":
            return block[::-1]
        return block.T if self._layout == "transposed" else block

    def check(self, expected: Array, what: str) -> None:
        """Raises AssertionError unless it has these values, in the current stream; later, when the stream in which it was made
        has come past it too, it must have them still, and all else the old ones."""
        check_same(self._home(self.x), expected, what)
        self._made_in.synchronize()
        self._within(self._block)[...] = expected
        check_same(self._home(self._near), self._block, f"{what}, and what is around it")

    def _home(self, x: Any) -> Array:
        found: Array = x if self._cupy is None else self._cupy.asnumpy(x)
        return found


class Call:
    """One operation of a random program.

    Args:
        place: its place in the program.
        members: world ranks of each group that there is; the world's come first.
        rows: how many the arrays have; None for any of ROWS.
    """

    def __init__(self, seed: int, place: int, members: list[list[int]], rows: int | None = None) -> None:
        chance = random.Random(f"{seed} {place}")
        self.place = place
        self.group = 0 if chance.random() < 0.6 else chance.randrange(len(members))
        self.size = len(members[self.group])
        self.operation = chance.choice(REDUCTIONS + MOVES + OTHERS)
        self.dtype = chance.choice(DTYPES)
        self.op = chance.choice(operators(self.dtype))
        self.root = chance.randrange(self.size)
        self.rows = [chance.choice(ROWS) if rows is None else rows for _ in range(max(self.size, PIECES))]
        self.rest: tuple[int, ...] = (3,) if chance.random() < 0.25 else ()
        self.out = chance.choice(["none", "none", "fresh", "same"])
        self.layouts = [chance.choice(LAYOUTS) for _ in range(3)]
        self.async_op = chance.random() < 0.5
        self.on_gpu = chance.random() < 0.9
        self.tells_kind = chance.random() < 0.7
        self.splits = chance.random() < 0.5
        self.late = chance.random() < 0.3

    def __repr__(self) -> str:
        said = {name: value for name, value in vars(self).items() if name not in ("operation", "dtype")}
        return f"{self.operation} of {self.dtype.label}, {said}"

    def value(self, rank: int, part: int = 0, rows: int | None = None) -> Array:
        """What a group rank brings."""
        rows = self.rows[0] if rows is None else rows
        shape = (min(rows, DRAWN_MAX), *self.rest)
        drawn = values(self.dtype, shape, rank, 32 * self.place + part)
        return np.resize(drawn, (rows, *self.rest)) if rows else drawn

    def total(self, part: int = 0, rows: int | None = None) -> Array:
        """The sum, or what else the operator makes of it."""
        return reduced([self.value(rank, part, rows) for rank in range(self.size)], self.op, self.dtype)

    def parts(self, rank: int) -> list[Array]:
        """What a group rank has for each: their sizes depend on the receiver."""
        return [self.value(rank, part, self.rows[part]) for part in range(self.size)]

    def expected(self, rank: int) -> Any:
        """The result on a group rank: an array, a list of them, or None."""
        everyone = range(self.size)
        found: dict[str, Callable[[], Any]] = {
            "all_reduce": self.total,
            "reduce": lambda: self.total() if rank == self.root else None,
            "reduce_scatter": lambda: self._reduced_part(rank),
            "broadcast": lambda: self.value(self.root),
            "gather": lambda: self._everyones() if rank == self.root else None,
            "all_gather": self._everyones,
            "scatter": lambda: self.value(self.root, rank, self.rows[rank]),
            "all_to_all": lambda: [self.value(other, rank, self.rows[rank]) for other in everyone],
            "around": lambda: self.value((rank - 1) % self.size),
            "streams": lambda: [self.total(piece, self.rows[piece]) for piece in range(PIECES)],
            "barrier": lambda: None,
        }
        return found[self.operation]()

    def _reduced_part(self, rank: int) -> Array:
        return np.array_split(self.total(), self.size)[rank] if self.splits else self.total(rank, self.rows[rank])

    def _everyones(self) -> list[Array]:
        return [self.value(rank, 0, self.rows[rank]) for rank in range(self.size)]


class Running:
    """A call that one rank has begun. What it uses of the GPU is in the stream that is current when it is made.

    Args:
        group: its group.
        stream: a stream of that group.
    """

    def __init__(self, cupy: Any, call: Call, group: ProcessGroup, stream: Stream) -> None:
        self.call, self._group, self._stream = call, group, stream
        self._cupy = cupy
        self._rank = group.rank
        self._expected = call.expected(group.rank)
        self._inputs: list[Placed] = []
        self._outs: Placed | list[Placed] | None = None
        self._sends: Any = None
        self.is_async = call.async_op and call.operation not in ("around", "barrier")
        self._began = getattr(self, f"_{call.operation}")()
        if not self.is_async:
            self._overwrite()

    def check(self) -> None:
        """Raises AssertionError unless the result is right; then nothing of it is in flight. The current stream may be another
        one than at the beginning if it is asynchronous."""
        what = f"{self.call!r} on group rank {self._rank}"
        if self.is_async:
            found = [work.wait() for work in self._began] if self.call.operation == "streams" else self._began.wait()
            self._overwrite()
        else:
            found = self._began
        if self._sends is not None:
            self._sends.wait()
        self._check(found, self._expected, self._outs, what)
        self._cupy.cuda.get_current_stream().synchronize()

    def _check(self, found: Any, expected: Any, outs: Any, what: str) -> None:
        if expected is None:
            assert found is None, f"{what} gave {found!r}"
        elif isinstance(expected, list):
            assert isinstance(found, list), f"{what} gave {found!r}"
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                self._check(one, other, None if outs is None else outs[place], f"{what}, item {place}")
        elif outs is not None:
            assert found is outs.x, f"{what} gave another array than out"
            outs.check(expected, what)
        else:
            assert isinstance(found, self._kind()), f"{what} gave a {type(found).__name__}"
            check_same(found if isinstance(found, np.ndarray) else self._cupy.asnumpy(found), expected, what)

    def _kind(self) -> type:
        """Of a result without out=."""
        call = self.call
        told = call.tells_kind or self._rank == call.root or call.operation not in ("broadcast", "scatter")
        found: type = self._cupy.ndarray if call.on_gpu and told and call.operation != "around" else np.ndarray
        return found

    def _overwrite(self) -> None:
        """The call has returned: its inputs may be changed."""
        outs = self._outs if isinstance(self._outs, list) else [self._outs]
        for each in self._inputs:
            if each not in outs and self._sends is None:
                each.x[...] = 0

    def _place(self, array: Array) -> Any:
        """An array as an input."""
        self._inputs.append(self._placed(array, self.call.layouts[len(self._inputs) % 2]))
        return self._inputs[-1].x

    def _placed(self, array: Array, layout: str) -> Placed:
        return Placed(self._cupy, array, self.call.dtype, layout, self.call.on_gpu)

    def _options(self, x: Any = None) -> dict[str, Any]:
        """out= and async_op=. Args: x: the input that may be the output, too."""
        call, expected = self.call, self._expected
        if call.out == "none" or expected is None:
            return {"async_op": call.async_op}
        if call.out == "same" and x is not None:
            self._outs = self._inputs[-1]
        elif isinstance(expected, list):
            self._outs = [self._placed(np.zeros_like(each), call.layouts[2]) for each in expected]
        else:
            self._outs = self._placed(np.zeros_like(expected), call.layouts[2])
        outs = [each.x for each in self._outs] if isinstance(self._outs, list) else self._outs.x
        return {"async_op": call.async_op, "out": outs}

    def _hint(self) -> Any:
        """What a rank that is not the root passes, to say of which kind its result is to be."""
        call = self.call
        empty = np.zeros(0, numpy_dtype(call.dtype))
        return (self._cupy.asarray(empty) if call.on_gpu else empty) if call.tells_kind else None

    # One method for each operation.

    def _all_reduce(self) -> Any:
        x = self._place(self.call.value(self._rank))
        return self._group.all_reduce(x, self.call.op, **self._options(x))

    def _reduce(self) -> Any:
        x = self._place(self.call.value(self._rank))
        return self._group.reduce(x, self.call.root, self.call.op, **self._options(x))

    def _reduce_scatter(self) -> Any:
        call = self.call
        parts = self._place(call.value(self._rank)) if call.splits else [self._place(part) for part in call.parts(self._rank)]
        return self._group.reduce_scatter(parts, call.op, **self._options())

    def _broadcast(self) -> Any:
        if self._rank == self.call.root:
            x = self._place(self.call.value(self._rank))
            return self._group.broadcast(x, self.call.root, **self._options(x))
        return self._group.broadcast(self._hint(), self.call.root, **self._options())

    def _gather(self) -> Any:
        x = self._place(self.call.value(self._rank, 0, self.call.rows[self._rank]))
        return self._group.gather(x, self.call.root, **self._options())

    def _all_gather(self) -> Any:
        x = self._place(self.call.value(self._rank, 0, self.call.rows[self._rank]))
        return self._group.all_gather(x, **self._options())

    def _scatter(self) -> Any:
        call = self.call
        parts = [self._place(part) for part in call.parts(self._rank)] if self._rank == call.root else self._hint()
        return self._group.scatter(parts, call.root, **self._options())

    def _all_to_all(self) -> Any:
        return self._group.all_to_all([self._place(part) for part in self.call.parts(self._rank)], **self._options())

    def _around(self) -> Any:
        """Everybody sends to the next rank."""
        if self.call.size == 1:
            self._expected = None
            return None
        x = self._place(self.call.value(self._rank))
        self._sends = self._group.send(x, (self._rank + 1) % self.call.size, tag=self.call.place, async_op=True)
        options = self._options()
        del options["async_op"]
        return self._group.recv((self._rank - 1) % self.call.size, tag=self.call.place, **options)

    def _streams(self) -> Any:
        """Several at once, which each rank begins in an order of its own."""
        call, works = self.call, {}
        self.is_async = True
        for piece in random.Random(f"{call.place} {self._rank}").sample(range(PIECES), PIECES):
            x = self._place(call.value(self._rank, piece, call.rows[piece]))
            works[piece] = self._stream.all_reduce(x, PIECES * call.place + piece, op=call.op)
        return [works[piece] for piece in range(PIECES)]

    def _barrier(self) -> Any:
        return self._group.barrier()


def program(seed: int, members: list[list[int]]) -> Iterator[Call]:
    """Calls without an end."""
    place = 0
    while True:
        yield Call(seed, place, members)
        place += 1
