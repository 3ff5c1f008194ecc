"""Copies the GPU arrays of an operation to the host and back while the operation runs over host transports.

Idea. For the executor, an input that is being downloaded is one more action (`DownloadInput`), which fills the input from its
first element to its last. A result that goes to a GPU is one more action (`UploadResult`), which reads the result. So the rules
that order a plan's actions (dependencies.py) order the transfers too: the first chunk is sent while later ones are still being
downloaded, and a finished slice is uploaded while others are still on the wire. The actions only report progress. The thread
that drives the operation does the copying, because a GPU notifies nobody: it polls the GPU each time it advances the operation.
It polls often while a download is in progress, and rarely afterwards.

A result that replaces an input, such as a sum, is written to the host memory into which that input was downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeAlias

import numpy as np

from ferrorpc.arrays.device import Device, is_host
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.arrays.staging import Download, Upload
from ferrorpc.collectives.algorithms.plan import Buffer, Region, Send
from ferrorpc.collectives.dependencies import UNBOUNDED
from ferrorpc.collectives.execution import Execution
from ferrorpc.collectives.fusion import DownloadInput, Task, UploadResult
from ferrorpc.collectives.polling import DevicePolling
from ferrorpc.collectives.workspace import Rules, Workspace
from ferrorpc.guard import Guard
from ferrorpc.types import TensorSpec, fits

Array = np.ndarray[Any, Any]
Source: TypeAlias = Any
"""An array on the host or on a device, or a Download."""
Target: TypeAlias = Any
"""An array on the host or on a device, or an Upload."""


def download_of(array: Source) -> Source:
    """A download of a GPU array, ordered after the calling thread's stream. A host array is returned as it is."""
    return array if is_host(array) or isinstance(array, Download) else kind_of(array).staging.start_download(array)


def upload_to(target: Target) -> Target:
    """An upload to a GPU array, ordered after the calling thread's stream. A host array is returned as it is."""
    return target if is_host(target) or isinstance(target, Upload) else kind_of(target).staging.start_upload(target)


def on_host(array: Source, guard: Guard) -> Array:
    """The array on the host, for an operation. Blocks while a GPU array is copied there. Raises as `Staging.to_pinned`."""
    found: Array = array if is_host(array) else kind_of(array).staging.to_pinned(array, guard)
    return found


def transfers_for(
    inputs: Sequence[Source], outputs: Sequence[Target] | None, out_items: int, in_place: int | None = None
) -> DeviceTransfers | None:
    """The transfers of an operation; None if all of its arrays are on the host.

    Args:
        outputs: where results go; None for new arrays, on the GPU of the inputs if any input is on one.
        out_items: the number of results.
        in_place: the input whose host memory the first result may overwrite.
    """
    if all(map(is_host, inputs)) and (outputs is None or all(map(is_host, outputs))):
        return None
    return DeviceTransfers(inputs, outputs, out_items, in_place)


class DeviceTransfers:
    """The transfers of one operation's arrays.

    It is made on the caller's thread. Only the driver uses it afterwards, except for `downloaded` and `allow_upload`.

    Attributes:
        sources: the inputs, with a `Download` in place of each GPU array.
        targets: the outputs, with an `Upload` in place of each GPU array. None for results on the host.
        has_new_input: more of an input was downloaded since the executor last looked.
        position: changes whenever a transfer has progressed so that the operation can go on.
    """

    def __init__(
        self, inputs: Sequence[Source], outputs: Sequence[Target] | None, out_items: int, in_place: int | None
    ) -> None:
        self.sources = [download_of(each) for each in inputs]
        if outputs is not None:
            self.targets: list[Target] | None = [upload_to(each) for each in outputs]
        else:
            on_device = [each for each in inputs if not is_host(each) and not isinstance(each, Download)]
            self.targets = [kind_of(on_device[0]).staging.start_upload() for _ in range(out_items)] if on_device else None
        self.has_new_input = True
        self.position = 0
        self._is_over = False
        """Whether the part on the host is over."""
        self._has_succeeded = False
        self._in_place = in_place
        self._downloads = downloads = {item: each for item, each in enumerate(self.sources) if isinstance(each, Download)}
        self._uploads = uploads = {item: each for item, each in enumerate(self.targets or ()) if isinstance(each, Upload)}
        self.polling = DevicePolling(
            lambda: not _are_complete(downloads) or any(each.waits_for_gpu for each in uploads.values())
        )

    @property
    def device(self) -> Device | None:
        """The GPU of the first array that is on one."""
        copies: list[Download | Upload] = [*self._downloads.values(), *self._uploads.values()]
        return copies[0].device if copies else None

    @property
    def inputs(self) -> list[Array]:
        """The inputs on the host. Some may be incomplete: see `downloaded`."""
        return [each.data if isinstance(each, Download) else each for each in self.sources]

    @property
    def outputs(self) -> list[Array | None] | None:
        """The caller's output arrays on the host, with None in place of GPU arrays."""
        return None if self.targets is None else [each if is_host(each) else None for each in self.targets]

    def host_memory(self, item: int, spec: TensorSpec) -> Array | None:
        """Host memory for a result that is uploaded; None for other results."""
        upload = self._uploads.get(item)
        if upload is None:
            return None
        download = self._downloads.get(self._in_place) if item == 0 and self._in_place is not None else None
        if download is not None and fits(download.data, spec):
            return download.data
        found: Array = upload.device.staging.host_memory(spec.shape, spec.dtype.storage)
        return found

    def advance(self, execution: Execution, on_host: Callable[[], bool]) -> bool:
        """Advances the downloads, the execution's part on the host (`on_host`, as `Execution.advance`), and the uploads.
        Returns whether all is complete or queued; then the results are on their devices."""
        self.advance_downloads()
        over = on_host()
        self.advance_uploads()
        results = self._finished(execution.results) if over else None
        if results is None:
            return False
        execution.results = results
        return True

    def advance_downloads(self) -> None:
        """Continues the downloads."""
        for download in self._downloads.values():
            if download.advance():
                self.has_new_input = True
                self.position += 1

    def downloaded(self, item: int) -> int:
        """How many elements of an input are on the host; UNBOUNDED if all are."""
        download = self._downloads.get(item)
        if download is None or download.is_complete:
            return UNBOUNDED
        return download.valid_bytes // download.data.itemsize

    @property
    def has_all_inputs(self) -> bool:
        """Whether all inputs are on the host."""
        return _are_complete(self._downloads)

    @property
    def waits_for_gpu(self) -> bool:
        """Whether the GPU holds up the operation: not all inputs are on the host, or all that is left are uploads."""
        return self._is_over or not self.has_all_inputs

    def allow_upload(self, item: int, data: Array, first: int, last: int) -> None:
        """Says that elements [first, last) of a result are final. `data` is the whole result on the host."""
        upload = self._uploads.get(item)
        if upload is not None:
            upload.allow(data, first * data.itemsize, last * data.itemsize)

    def advance_uploads(self) -> None:
        """Continues the uploads."""
        for upload in self._uploads.values():
            if upload.advance():
                self.position += 1

    def _finished(self, results: Sequence[Array]) -> list[Any] | None:
        """The results of a complete operation, each on its own device; None while uploads are not all queued."""
        found: list[Any] = list(results)
        uploads = [(item, upload) for item, upload in self._uploads.items() if item < len(found)]
        if not self._is_over:
            self._is_over = True
            for item, upload in uploads:
                if not found[item].size:
                    upload.allow(found[item], 0, 0)  # no action writes an empty result
                    upload.advance()
        if not all(upload.is_complete for _, upload in uploads):
            return None
        self._has_succeeded = True
        for item, upload in uploads:
            found[item] = upload.target
        return found

    def make_stream_wait(self) -> None:
        """Makes the calling thread's current stream wait for the uploads."""
        for upload in self._uploads.values():
            upload.make_stream_wait()

    def finish(self) -> None:
        """Ends the transfers, complete or not, and releases what they hold; all of them also where one is interrupted."""
        copies: list[Download | Upload] = [*self._uploads.values(), *self._downloads.values()]
        with ExitStack() as stack:
            for upload in self._uploads.values() if not self._has_succeeded else ():
                stack.callback(upload.hold_caller)
            for each in copies:
                stack.callback(each.finish)


class TransferWorkspace(Workspace):
    """The host side of one run's arrays, some of which are downloaded or uploaded."""

    def __init__(self, rules: Rules, transfers: DeviceTransfers) -> None:
        self._transfers = transfers
        super().__init__(rules, transfers.inputs, transfers.outputs)

    def _room(self, item: int, spec: TensorSpec) -> Array:
        place = self._transfers.host_memory(item, spec)
        return super()._room(item, spec) if place is None else place


def _are_complete(downloads: Mapping[int, Download]) -> bool:
    return all(download.is_complete for download in downloads.values())


def with_transfers(tasks: tuple[Task, ...], in_items: int) -> tuple[Task, ...]:
    """An executor's tasks, with a download of every input before them and an upload of every part of a result after them.

    A result that several actions write is uploaded in the parts that they write, in the order in which these are finished. It
    is uploaded as a whole if the parts overlap.
    """
    parts: dict[int, list[Region]] = {}
    for task in tasks:
        region = task.region
        if region.buffer is Buffer.OUT and not isinstance(task, Send) and region not in parts.setdefault(region.item, []):
            parts[region.item].append(region)
    downloading = tuple(DownloadInput(Region(Buffer.IN, item)) for item in range(in_items))
    return (*downloading, *tasks, *(UploadResult(region) for regions in parts.values() for region in _disjoint(regions)))


def _disjoint(regions: list[Region]) -> list[Region]:
    """The regions themselves if they are disjoint, else one region that covers them."""
    ordered = sorted(regions, key=lambda region: region.start)
    ends = [UNBOUNDED if region.stop is None else region.stop for region in ordered]
    if all(region.start >= end for region, end in zip(ordered[1:], ends, strict=False)):
        return ordered
    stop = max(ends)
    return [Region(Buffer.OUT, ordered[0].item, ordered[0].start, None if stop == UNBOUNDED else stop)]
