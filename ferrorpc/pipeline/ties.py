"""Tied weights: one weight that several stages hold, such as an embedding that is also the model's last layer.

Every holder has a copy. Copies begin alike, and after each step each has the sum of all holders' gradients, added in the order
of the stages, so that equal optimizers keep them alike bit for bit. A holder sends its gradient to the other holders' ranks
as soon as its own last backward is done; nobody waits before the end of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ferrorpc.arrays.kinds import kind_of, spec_of, view, view_out
from ferrorpc.errors import UsageError
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.wire import Sort, Wire

if TYPE_CHECKING:
    from ferrorpc.group import ProcessGroup


class Tie:
    """One tied weight as this rank sees it.

    Args:
        number: of the tie.
        names: of the weight, by the piece that holds it, in ascending order.
        pieces: this rank's.
        placement: the rank of each piece.
        rank: this rank.
    """

    def __init__(
        self, number: int, names: Mapping[int, str], pieces: Mapping[int, Piece], placement: Sequence[int], rank: int
    ) -> None:
        self.holders = list(names)
        self.own = {piece: pieces[piece].named_parameters()[name] for piece, name in names.items() if placement[piece] == rank}
        self._number = number
        self._remote = [piece for piece in names if placement[piece] != rank]
        self._takers = list({placement[piece]: piece for piece in reversed(self._remote)}.values())  # the first of each rank
        self._due = len(self.own)
        self._before: dict[int, Any] = {}

    def spread(self, exchange: Exchange) -> None:
        """Gives every holder the weights of the first one."""
        first = self.holders[0]
        if first in self.own:
            for taker in self._takers:
                exchange.send(Wire(first, taker, Sort.TIED, self._number), self.own[first].data)
            data = self.own[first].data
        elif self.own:
            data = exchange.receive(self.spreads()[0], kind_of(next(iter(self.own.values())).data))
        for piece, parameter in self.own.items():
            if piece != first:
                place = view_out(parameter.data, spec_of(parameter.data))
                place.data[...] = view(data).data
                place.commit()

    def spreads(self) -> list[Wire]:
        """What arrives for `spread`."""
        first = self.holders[0]
        return [] if first in self.own or not self.own else [Wire(first, min(self.own), Sort.TIED, self._number)]

    def arrivals(self) -> list[Wire]:
        """What arrives for `settle`."""
        return [Wire(piece, min(self.own), Sort.TIED, self._number) for piece in self._remote] if self.own else []

    def begin(self) -> None:
        """A step begins: what gradients are there from earlier ones is put aside, since all holders have it."""
        self._due = len(self.own)
        self._before = {piece: parameter.grad for piece, parameter in self.own.items()}
        for parameter in self.own.values():
            parameter.grad = None

    def complete(self, piece: int, exchange: Exchange) -> None:
        """A piece of this rank has done its last backward. With the last holder here their gradients go out."""
        if piece not in self.own:
            return
        self._due -= 1
        if self._due:
            return
        for holder, grad in self._gradients():
            for taker in self._takers:
                exchange.send(Wire(holder, taker, Sort.TIED, self._number), grad)

    def settle(self, exchange: Exchange) -> None:
        """Every holder gets the sum, added to what was there before the step."""
        if not self.own:
            return
        kind = kind_of(next(iter(self.own.values())).data)
        parts = dict(self._gradients())
        for wire in self.arrivals():
            parts[wire.source] = exchange.receive(wire, kind)
        total = None
        for piece in self.holders:
            if parts[piece] is not None:
                total = parts[piece] if total is None else total + parts[piece]
        for piece, parameter in self.own.items():
            parameter.grad = self._grown(self._before[piece], total)
        self._before = {}

    def _gradients(self) -> Iterator[tuple[int, Any]]:
        """Own holders' gradients. Pieces that share one parameter object have one gradient, the first one's."""
        seen: set[int] = set()
        for piece, parameter in self.own.items():
            yield piece, None if id(parameter) in seen else parameter.grad
            seen.add(id(parameter))

    @staticmethod
    def _grown(before: Any, total: Any) -> Any:
        """A new array, so that no two holders share one."""
        if total is None or before is not None:
            return before if total is None else before + total
        got = view(total)
        return got.kind.wrap(np.array(got.data), got.spec)


class Ties:
    """All tied weights of a pipeline. Collective.

    Args:
        tied: for each tied weight the names of its copies, as "piece/name": [("0/embedding", "3/head")].
        pieces: this rank's.
        placement: the rank of each piece.
        group: the pipeline's ranks.

    Raises:
        UsageError: a weight does not exist, copies differ in dtype or shape, or one is in two ties; on every rank alike.
    """

    def __init__(
        self,
        tied: Iterable[Iterable[str]],
        pieces: Mapping[int, Piece],
        placement: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        named = [_holders(names, len(placement)) for names in tied]
        if named:
            _check(named, _everyones(pieces, group))
        self._ties = [Tie(number, names, pieces, placement, group.rank) for number, names in enumerate(named)]

    def holds(self, piece: int) -> bool:
        """Whether a piece of this rank has a tied weight, so that its gradients are complete only with the step."""
        return any(piece in tie.own for tie in self._ties)

    def spreads(self) -> list[Wire]:
        """What arrives for `spread`, in order."""
        return [wire for tie in self._ties for wire in tie.spreads()]

    def arrivals(self) -> list[Wire]:
        """What arrives for `settle`, in order."""
        return [wire for tie in self._ties for wire in tie.arrivals()]

    def spread(self, exchange: Exchange) -> None:
        """Gives all copies of a weight the value of the first."""
        for tie in self._ties:
            tie.spread(exchange)

    def begin(self) -> None:
        """A step begins."""
        for tie in self._ties:
            tie.begin()

    def complete(self, piece: int, exchange: Exchange) -> None:
        """A piece of this rank has done its last backward."""
        for tie in self._ties:
            tie.complete(piece, exchange)

    def settle(self, exchange: Exchange) -> None:
        """Gives all copies the sum of all their gradients."""
        for tie in self._ties:
            tie.settle(exchange)


def _holders(names: Iterable[str], pieces: int) -> dict[int, str]:
    """Piece -> name of its copy, in ascending order."""
    given = [names] if isinstance(names, str) else list(names)
    found: dict[int, str] = {}
    for each in given:
        piece, _, name = each.partition("/")
        if not piece.isdecimal() or not name or int(piece) >= pieces or int(piece) in found:
            raise UsageError(
                f"{each!r} names no weight that can be tied to others of {given}",
                hint='write the stage and the name its named_parameters() gives, such as "0/embedding.weight", each stage once',
            )
        found[int(piece)] = name
    if len(found) < 2:
        raise UsageError(f"a tie of {given} ties nothing", hint='tied=[("0/embedding.weight", "3/head.weight")]')
    return dict(sorted(found.items()))


def _everyones(pieces: Mapping[int, Piece], group: ProcessGroup) -> dict[str, str]:
    """ "piece/name" -> dtype and shape, of all ranks' weights."""
    own = {
        f"{number}/{name}": str(spec_of(parameter.data))
        for number, piece in pieces.items()
        for name, parameter in piece.named_parameters().items()
    }
    found: dict[str, str] = {}
    for text in group.all_gather(np.frombuffer(json.dumps(own).encode(), np.uint8)):
        found.update(json.loads(bytes(text)))
    return found


def _check(named: Sequence[Mapping[int, str]], specs: Mapping[str, str]) -> None:
    seen: set[str] = set()
    for names in named:
        full = [f"{piece}/{name}" for piece, name in names.items()]
        for each in full:
            if each not in specs:
                known = ", ".join(other for other in specs if other.startswith(each.partition("/")[0] + "/"))
                raise UsageError(f"there is no weight {each!r} to tie", hint=f"that stage has {known or 'none'}")
            if each in seen:
                raise UsageError(f"weight {each!r} is in two ties", hint="put all copies of a weight into one tie")
            seen.add(each)
        if len({specs[each] for each in full}) > 1:
            raise UsageError(
                "tied weights differ: " + ", ".join(f"{each} is {specs[each]}" for each in full),
                hint="tie copies of one weight, of the same dtype and shape",
            )
