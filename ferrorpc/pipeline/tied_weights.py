"""Tied weights: one weight that several stages have, such as an embedding that is also the model's last layer.

Each of these stages has a copy. Copies begin with the same value, and after each step each has the sum of all copies'
gradients, added in the order of the stages. So equal optimizers keep the copies equal bit for bit. A stage sends its gradient
to the ranks with the other copies as soon as its last backward is done; it waits for theirs only at the end of the step. If a
copy was replaced, its value goes with the gradient, to be compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np

from ferrorpc.arrays.base import Kind
from ferrorpc.arrays.kinds import copied, copy_into, kind_of, spec_of, view, view_out
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.failure import others_told
from ferrorpc.group import ProcessGroup
from ferrorpc.pipeline.batch import converted
from ferrorpc.pipeline.exchange import Exchange
from ferrorpc.pipeline.stage import Piece
from ferrorpc.pipeline.transfers import Transfer, TransferKind

_ONE_TIE: Final = "put all copies of a weight into one tie"


class _Before(NamedTuple):
    """A gradient of earlier steps."""

    array: Any
    """What a copy had as its gradient; its stage may keep this array, and add to it."""
    value: Any
    """A copy of what was in it."""


class TiedWeight:
    """One tied weight, on a rank with a copy of it.

    Args:
        number: of the tied weight.
        names: the parameter's name in each piece that holds a copy, in ascending order of pieces.
        placement: the rank of each piece.
        rank: this rank.

    Attributes:
        own: the copies on this rank, by piece, as they were when they were looked up.
    """

    def __init__(self, number: int, names: Mapping[int, str], placement: Sequence[int], rank: int) -> None:
        self.own: dict[int, Any] = {piece: None for piece in names if placement[piece] == rank}
        self._names = names
        self._first = min(names)
        self._number = number
        self._remote = [piece for piece in names if placement[piece] != rank]
        self._targets = list({placement[piece]: piece for piece in reversed(self._remote)}.values())
        """The first holder on each other rank: a rank receives once, for all of its copies."""
        self._backwards_left = len(self.own)
        self._grads_before: list[tuple[Any, _Before | None]] = []
        """Each parameter with what it had; one that two pieces share is there once."""
        self._is_replaced = False
        """Whether a copy on this rank is another object than in the step before: all copies are compared then."""

    def look_up(self, parameters: Mapping[int, Mapping[str, Any]], tie_of: dict[int, TiedWeight]) -> None:
        """Finds the copies on this rank.

        Args:
            parameters: of each piece, under all of their names.
            tie_of: the tied weight that each parameter was found to be, by its id; gets those of this one.

        Raises:
            UsageError: a copy is not there any more, or is in another tie, too.
        """
        for piece in self.own:
            name = self._names[piece]
            if name not in parameters[piece]:
                raise UsageError(
                    f"the tied weight '{piece}/{name}' is not there any more",
                    hint=f"stage {piece} has {', '.join(parameters[piece]) or 'none'}; tie these in a new Pipeline",
                )
            before, self.own[piece] = self.own[piece], parameters[piece][name]
            self._is_replaced |= before is not None and before is not self.own[piece]
            if tie_of.setdefault(id(self.own[piece]), self) is not self:
                raise UsageError(f"weight '{piece}/{name}' is in two ties, under two names", hint=_ONE_TIE)

    def broadcast(self, exchange: Exchange) -> None:
        """Gives all copies the value of the first one."""
        if self._first in self.own:
            data = self.own[self._first].data
            for target in self._targets:
                exchange.send(self._transfer(self._first, target), data)
        else:
            data = exchange.receive(self.broadcast_receives()[0], self._kind())
        for piece, parameter in self.own.items():
            if piece != self._first:
                place = view_out(parameter.data, spec_of(parameter.data))
                place.data[...] = view(data).data
                place.commit()

    def broadcast_receives(self) -> list[Transfer]:
        """What this rank receives for `broadcast`."""
        return [] if self._first in self.own else [self._transfer(self._first, min(self.own))]

    def gradient_receives(self) -> list[Transfer]:
        """What this rank receives for `sum_gradients`."""
        return [self._transfer(piece, min(self.own)) for piece in self._remote]

    def begin_step(self) -> None:
        """Sets gradients of earlier steps aside: all copies have the same ones, so they must not be summed again. Zeros take
        the place of one that is there, because stages add to it; where two copies have one array, the second gets another."""
        self._backwards_left = len(self.own)
        found: list[tuple[Any, _Before | None]] = []
        places: set[int] = set()
        for parameter in {id(each): each for each in self.own.values()}.values():
            before = None
            if parameter.grad is not None:
                value, place = copied(parameter.grad), kind_of(parameter.grad).pointer_of(parameter.grad)
                before = _Before(copied(value) if place in places else parameter.grad, value)
                places.add(place)
            found.append((parameter, before))
        self._grads_before = found
        for parameter, before in found:
            if before is not None:
                parameter.grad = _written(before.array, _zeros_like(before.value))

    def piece_completed(self, piece: int, exchange: Exchange) -> None:
        """A piece of this rank has done its last backward. If it is the last one here with a copy, their gradients are sent."""
        if piece not in self.own:
            return
        self._backwards_left -= 1
        if self._backwards_left:
            return
        for holder, grad in self._gradients():
            for target in self._targets:
                value = (grad, self.own[holder].data) if self._is_replaced else grad
                exchange.send(self._transfer(holder, target), value)

    def sum_gradients(self, exchange: Exchange) -> None:
        """Gives this rank's copies the sum of all gradients, added to what was there before the step.

        Raises:
            UsageError: a copy was replaced, and has not the value of the others.
        """
        kind = self._kind()
        parts = dict(self._gradients())
        if self._is_replaced:
            self._check_alike({piece: parameter.data for piece, parameter in self.own.items()})
        for transfer in self.gradient_receives():
            part = exchange.receive(transfer, kind)
            if isinstance(part, tuple):
                part, data = part
                self._check_alike({min(self.own): self.own[min(self.own)].data, transfer.source: data})
            parts[transfer.source] = part
        total = None
        for piece in self._names:
            if parts[piece] is not None:
                part = converted(parts[piece], kind)
                total = part if total is None else total + part
        sums = [_sum(before, total, kind_of(parameter.data)) for parameter, before in self._grads_before]
        for (parameter, before), value in zip(self._grads_before, sums, strict=True):
            if before is not None and parameter.grad is before.array:
                parameter.grad = _written(before.array, value)
            else:
                _put_back(before)
                parameter.grad = value

    def end_step(self) -> None:
        """Forgets the gradients of earlier steps, which are in the sums now."""
        self._grads_before = []
        self._is_replaced = False

    def undo_step(self) -> None:
        """Puts the gradients of earlier steps back, if the step began and did not end."""
        for parameter, before in self._grads_before:
            parameter.grad = _put_back(before)
        self._grads_before = []

    def _check_alike(self, copies: Mapping[int, Any]) -> None:
        """Raises UsageError if copies of these pieces are not equal bit for bit."""
        (first, data), *others = copies.items()
        for piece, other in others:
            if spec_of(data) != spec_of(other) or view(data).data.tobytes() != view(other).data.tobytes():
                names = f"'{first}/{self._names[first]}', '{piece}/{self._names[piece]}'"
                raise UsageError(
                    f"the tied weights {names} differ, since one of them was replaced",
                    hint="replace all copies, by equal ones, or make the Pipeline anew, which gives all the first one's value",
                )

    def _transfer(self, source: int, target: int) -> Transfer:
        return Transfer(source, target, TransferKind.TIED, self._number)

    def _kind(self) -> Kind:
        return kind_of(next(iter(self.own.values())).data)

    def _gradients(self) -> Iterator[tuple[int, Any]]:
        """The gradients on this rank, by piece. Pieces that share one parameter object have one gradient, the first piece's."""
        seen: set[int] = set()
        for piece, parameter in self.own.items():
            yield piece, None if id(parameter) in seen else parameter.grad
            seen.add(id(parameter))


def _sum(before: _Before | None, total: Any, kind: Kind) -> Any:
    """The sum, in a new array of that kind, so that no two copies share one."""
    if total is None:
        return None if before is None else before.value
    return copied(total, kind) if before is None else before.value + converted(total, kind)


def _zeros_like(array: Any) -> Any:
    spec = spec_of(array)
    return kind_of(array).wrap(np.zeros(spec.shape, spec.dtype.storage), spec)


def _written(array: Any, value: Any) -> Any:
    """The array with this value; the value itself if the array cannot be written."""
    try:
        place = view_out(array, spec_of(value), on_device=True)
    except (TensorMismatchError, UsageError):
        return value
    copy_into(place.data, view(value, on_device=True).data)
    return place.commit()


def _put_back(before: _Before | None) -> Any:
    """The gradient of earlier steps as it was."""
    return None if before is None else _written(before.array, before.value)


class TiedWeights:
    """All tied weights of a pipeline. Collective.

    Args:
        tied: for each tied weight the names of its copies, as "piece/name": [("0/embedding", "3/head")].
        pieces: this rank's.
        placement: the rank of each piece.
        group: the pipeline's ranks.

    Raises:
        UsageError: a weight does not exist, is no array of a supported dtype, or is tied twice, or copies differ in dtype or
            shape; on every rank alike.
    """

    def __init__(
        self,
        tied: Sequence[Sequence[str]],
        pieces: Mapping[int, Piece],
        placement: Sequence[int],
        group: ProcessGroup,
    ) -> None:
        named = [_holders(names, len(placement)) for names in tied]
        if named:
            _check(named, _all_weights(named, pieces, group))
        weights = (TiedWeight(number, names, placement, group.rank) for number, names in enumerate(named))
        self._weights = [weight for weight in weights if weight.own]
        self._pieces = {number: piece for number, piece in pieces.items() if self.in_piece(number)}

    def in_piece(self, piece: int) -> bool:
        """Whether a piece of this rank has a tied weight: then its gradients are complete only at the end of the step."""
        return any(piece in weight.own for weight in self._weights)

    def check_shared(self, parameters: Sequence[tuple[str, Any]]) -> None:
        """Raises UsageError if two pieces have one parameter that is not tied: its gradient is complete with the last of them.

        Args:
            parameters: this rank's, with their names as "piece/name".
        """
        self._look_up()
        tied = {id(each): weight.own.keys() for weight in self._weights for each in weight.own.values()}
        names: dict[int, str] = {}
        for name, each in parameters:
            first = names.setdefault(id(each), name)
            pieces = {int(first.partition("/")[0]), int(name.partition("/")[0])}
            is_shared = len(pieces) > 1 and getattr(each, "requires_grad", True)
            if is_shared and not pieces <= tied.get(id(each), frozenset()):
                raise UsageError(
                    f"stages share the weight {first!r}, {name!r}, so on_gradients would get its gradient early",
                    hint=f"tied=[({first!r}, {name!r})]",
                )

    def broadcast_receives(self) -> list[Transfer]:
        """What this rank receives for `broadcast`, in order."""
        return [transfer for weight in self._weights for transfer in weight.broadcast_receives()]

    def gradient_receives(self) -> list[Transfer]:
        """What this rank receives at the end of a step, in order."""
        return [transfer for weight in self._weights for transfer in weight.gradient_receives()]

    def broadcast(self, exchange: Exchange) -> None:
        """Gives all copies of each weight the value of the first one."""
        self._look_up()
        for weight in self._weights:
            weight.broadcast(exchange)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context for the backwards of a step, and what is behind them. After an error all copies have the gradients from
        before the step. Raises UsageError if a tied weight is not there any more."""
        try:
            self._look_up()
            for weight in self._weights:
                weight.begin_step()
            yield
            for weight in self._weights:
                weight.end_step()
        except BaseException:
            for weight in self._weights:
                weight.undo_step()
            raise

    def piece_completed(self, piece: int, exchange: Exchange) -> None:
        """Must be called when a piece of this rank has done its last backward."""
        for weight in self._weights:
            weight.piece_completed(piece, exchange)

    def sum_gradients(self, exchange: Exchange) -> None:
        """Gives all copies of each weight the sum of their gradients."""
        for weight in self._weights:
            weight.sum_gradients(exchange)

    def _look_up(self) -> None:
        """Finds the copies on this rank. Each time, because modules may replace their parameters."""
        parameters = {number: piece.named_parameters(aliases=True) for number, piece in self._pieces.items()}
        tie_of: dict[int, TiedWeight] = {}
        for weight in self._weights:
            weight.look_up(parameters, tie_of)


def _holders(names: Sequence[str], pieces: int) -> dict[int, str]:
    """The name of the copy in each piece, in ascending order of pieces."""
    found: dict[int, str] = {}
    for each in names:
        piece, _, name = each.partition("/")
        if not piece.isdecimal() or not name or int(piece) >= pieces or int(piece) in found:
            raise UsageError(
                f"{each!r} names no weight that can be tied to others of {names}",
                hint='write the stage and the name its named_parameters() gives, such as "0/embedding.weight", each stage once',
            )
        found[int(piece)] = name
    if len(found) < 2:
        raise UsageError(f"a tie of {names} ties nothing", hint='tied=[("0/embedding.weight", "3/head.weight")]')
    return dict(sorted(found.items()))


def _all_weights(named: Sequence[Mapping[int, str]], pieces: Mapping[int, Piece], group: ProcessGroup) -> dict[str, str]:
    """The names of all ranks' weights, as "piece/name", with dtype and shape of those that are tied.

    Raises:
        UsageError: a tied one cannot be described; on every rank alike.
    """
    tied = {f"{piece}/{name}" for names in named for piece, name in names.items()}
    own: dict[str, str] = {}
    problem: list[str] = []
    with others_told(group):
        parameters = {
            f"{number}/{name}": each for number, piece in pieces.items() for name, each in piece.named_parameters(True).items()
        }
    for full, parameter in parameters.items():
        if full in tied and not hasattr(parameter, "grad"):
            what = f"tied weight {full!r} is a bare {type(parameter).__name__}, without .data and .grad"
            problem = [what, "wrap it: ferrorpc.Parameter(array)"]
            continue
        try:
            own[full] = str(spec_of(getattr(parameter, "data", None))) if full in tied else ""
        except UsageError as error:
            problem = [f"tied weight {full!r}: {error.message}", error.hint]
    found: dict[str, str] = {}
    for text in group.all_gather(np.frombuffer(json.dumps([own, problem]).encode(), np.uint8)):
        theirs, problem = json.loads(bytes(text))
        if problem:
            raise UsageError(problem[0], hint=problem[1])
        found.update(theirs)
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
                raise UsageError(f"weight {each!r} is in two ties", hint=_ONE_TIE)
            seen.add(each)
        if len({specs[each] for each in full}) > 1:
            raise UsageError(
                "tied weights differ: " + ", ".join(f"{each} is {specs[each]}" for each in full),
                hint="tie copies of one weight, of the same dtype and shape",
            )
