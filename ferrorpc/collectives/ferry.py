"""Arrays of a GPU in an operation over host lanes: they come and go chunk by chunk while it runs.

Idea. To the executor an array that still comes down from a GPU is one more action (`Land`) that fills it from the first element
to the last, and one whose results go up is one more (`Lift`) that reads them. So what follows from the plan for messages
(dependencies.py) orders these as well: the first chunk is sent while later ones still come down, and a slice that is finished
goes up while others are on the wire. The actions only say how far things are. The copies themselves are the driver's, which
looks at the GPU whenever it looks at the operation, so threads that bring messages never wait for one. It looks often as long
as something comes down; then whoever brings news wakes it, as without a GPU, and what can go up meanwhile it finds now and
then.

A result that takes the place of an input, as a sum does, lies where that came down: nobody else needs it any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ferrorpc.arrays.device import Device, is_host
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.arrays.staging import Ascent, Descent
from ferrorpc.collectives.algorithms.plan import Buffer, Region, Send
from ferrorpc.collectives.dependencies import UNBOUNDED
from ferrorpc.collectives.fusion import Land, Lift, Task
from ferrorpc.collectives.polling import DevicePolling
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.types import TensorSpec

Array = np.ndarray[Any, Any]
Source: TypeAlias = Any
"""An array on the host or on a device, or a Descent."""
Target: TypeAlias = Any
"""An array on the host or on a device, or an Ascent."""


def descending(array: Source) -> Source:
    """An array of a device on its way to the host, ordered after the calling thread's stream; one of the host as it is."""
    return array if is_host(array) or isinstance(array, Descent) else kind_of(array).staging.descent(array)


def ascending(target: Target) -> Target:
    """The way to a device's array, ordered after the calling thread's stream; one of the host as it is."""
    return target if is_host(target) or isinstance(target, Ascent) else kind_of(target).staging.ascent(target)


def home(array: Source) -> Array:
    """An array on the host, waited for where it is on a device."""
    found: Array = array if is_host(array) else kind_of(array).staging.lent(array)
    return found


def ferry_for(
    inputs: Sequence[Source], outputs: Sequence[Target] | None, out_items: int, in_place: int | None = None
) -> Ferry | None:
    """What carries an operation's arrays; None where all of them are on the host.

    Args:
        outputs: where results go; None for new arrays, on the device of the inputs if there is one.
        out_items: how many results there are.
        in_place: the input in whose memory the first result may be, if there is one.
    """
    if all(map(is_host, inputs)) and (outputs is None or all(map(is_host, outputs))):
        return None
    return Ferry(inputs, outputs, out_items, in_place)


class Ferry:
    """The arrays of one operation. Made on the caller's thread, and but for `landed` and `lift` only its driver's.

    Attributes:
        sources: the inputs; those of a device as what brings them down.
        targets: the outputs; those of a device as what takes them up. None where nothing goes up and none were given.
        news: more has landed since the executor last looked.
        position: changes whenever anything moved that more will follow of, without any other news.
    """

    def __init__(
        self, inputs: Sequence[Source], outputs: Sequence[Target] | None, out_items: int, in_place: int | None = None
    ) -> None:
        self.sources = [descending(each) for each in inputs]
        if outputs is not None:
            self.targets: list[Target] | None = [ascending(each) for each in outputs]
        else:
            near = [each for each in inputs if not is_host(each) and not isinstance(each, Descent)]
            self.targets = [kind_of(near[0]).staging.ascent() for _ in range(out_items)] if near else None
        self.news = True
        self.position = 0
        self._is_over = False
        self._in_place = in_place
        self._descents = descents = {item: each for item, each in enumerate(self.sources) if isinstance(each, Descent)}
        self.polling = DevicePolling(lambda: not _have_landed(descents))
        self._ascents = {item: each for item, each in enumerate(self.targets or ()) if isinstance(each, Ascent)}

    @property
    def device(self) -> Device | None:
        """That of the first array that is on one."""
        ways: list[Descent | Ascent] = [*self._descents.values(), *self._ascents.values()]
        return ways[0].device if ways else None

    @property
    def inputs(self) -> list[Array]:
        """Those arrays on the host; some may still be on their way: see `landed`."""
        return [each.data if isinstance(each, Descent) else each for each in self.sources]

    @property
    def outputs(self) -> list[Array | None] | None:
        """The caller's arrays that are on the host, None in place of others."""
        return None if self.targets is None else [each if is_host(each) else None for each in self.targets]

    def place(self, item: int, spec: TensorSpec) -> Array | None:
        """Memory on the host for a result that goes up to a device; None for others."""
        ascent, storage = self._ascents.get(item), spec.dtype.storage
        if ascent is None:
            return None
        descent = self._descents.get(self._in_place) if item == 0 and self._in_place is not None else None
        if descent is not None and descent.data.shape == spec.shape and descent.data.dtype == storage:
            return descent.data
        room: Array = ascent.device.staging.room(spec.shape, storage)
        return room

    def land(self) -> None:
        """Brings on what comes down."""
        for descent in self._descents.values():
            if descent.advance():
                self.news = True
                self.position += 1

    def landed(self, item: int) -> int:
        """How many elements of an input are here; UNBOUNDED when all are."""
        descent = self._descents.get(item)
        if descent is None or descent.is_complete:
            return UNBOUNDED
        return descent.here // descent.data.itemsize

    @property
    def has_landed(self) -> bool:
        """Whether all inputs are here."""
        return _have_landed(self._descents)

    def lift(self, item: int, data: Array, first: int, last: int) -> None:
        """Elements [first, last) of a result are as they shall be. `data`: the whole of it, on the host."""
        ascent = self._ascents.get(item)
        if ascent is not None:
            ascent.allow(data, first * data.itemsize, last * data.itemsize)

    def rise(self) -> None:
        """Takes on what goes up."""
        for ascent in self._ascents.values():
            if ascent.advance():
                self.position += 1

    def brought(self, results: Sequence[Array]) -> list[Any] | None:
        """The results of the complete operation, each where it belongs; None while some are not all on their way up."""
        found: list[Any] = list(results)
        ascents = [(item, ascent) for item, ascent in self._ascents.items() if item < len(found)]
        if not self._is_over:
            self._is_over = True
            for item, ascent in ascents:
                if not found[item].size:
                    ascent.allow(found[item], 0, 0)  # it was written by no action
                    ascent.advance()
        if not all(ascent.is_complete for _, ascent in ascents):
            return None
        for item, ascent in ascents:
            found[item] = ascent.target
        return found

    def arrive(self) -> None:
        """The calling thread's current stream goes on after the results."""
        for ascent in self._ascents.values():
            ascent.arrive()

    def finish(self) -> None:
        """The operation is over: lets go of what it held."""
        for descent in self._descents.values():
            descent.finish()
        for ascent in self._ascents.values():
            ascent.finish()


class FerriedWorkspace(Workspace):
    """The arrays of one run on the host, some of which come from a device or go there."""

    def __init__(self, rules: Rules, ferry: Ferry) -> None:
        self._ferry = ferry
        super().__init__(rules, ferry.inputs, ferry.outputs)

    def _room(self, item: int, spec: TensorSpec) -> Array:
        place = self._ferry.place(item, spec)
        return super()._room(item, spec) if place is None else place


def _have_landed(descents: Mapping[int, Descent]) -> bool:
    return all(descent.is_complete for descent in descents.values())


def ferried(tasks: tuple[Task, ...], in_items: int) -> tuple[Task, ...]:
    """An executor's tasks with those that bring arrays from a device and there: every input, and every part of a result.

    A result that several actions write goes up in the parts that they write, in whatever order these are finished; as one
    where the parts overlap.
    """
    parts: dict[int, list[Region]] = {}
    for task in tasks:
        region = task.region
        if region.buffer is Buffer.OUT and not isinstance(task, Send) and region not in parts.setdefault(region.item, []):
            parts[region.item].append(region)
    landing = tuple(Land(Region(Buffer.IN, item)) for item in range(in_items))
    return (*landing, *tasks, *(Lift(region) for regions in parts.values() for region in _apart(regions)))


def _apart(regions: list[Region]) -> list[Region]:
    """The regions themselves where no two have elements in common, else one that covers them."""
    ordered = sorted(regions, key=lambda region: region.start)
    ends = [UNBOUNDED if region.stop is None else region.stop for region in ordered]
    if all(region.start >= end for region, end in zip(ordered[1:], ends, strict=False)):
        return ordered
    stop = max(ends)
    return [Region(Buffer.OUT, ordered[0].item, ordered[0].start, None if stop == UNBOUNDED else stop)]
