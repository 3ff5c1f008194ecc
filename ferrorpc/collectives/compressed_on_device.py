"""Compressed reductions of arrays on a GPU, which encodes, decodes and adds.

Idea. Only encoded bytes, two to four times fewer than the arrays have, go through pinned memory. The plan and the executor are
those of host arrays; only what an action does to its elements is a kernel. Kernels and host agree bit for bit on codecs and on
the left fold (testing/gpu/reference.py), so ranks with arrays on the host and ranks with arrays on a GPU may take part in one
operation.

Streams. All kernels of a device are launched in one stream, in the order in which actions are done: "done" means queued. They
are launched only once the caller's stream has reached the point of the call, so no operation delays another's kernels. Streams
that use the result wait for the last of them.

Cost, for n bytes of float32 on p ranks, encoded to m: two_shot downloads m and uploads 2 m (p-1)/p.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import numpy as np

from ferrorpc.arrays.device import Device, DeviceArray, is_host
from ferrorpc.arrays.event import Event
from ferrorpc.arrays.kinds import kind_of
from ferrorpc.arrays.staging import Download, Upload
from ferrorpc.collectives.algorithms.plan import Copy, Finish, Fold, FoldOwn, FoldUnder, Load, Receive, Region
from ferrorpc.collectives.call import Call
from ferrorpc.collectives.executor import Layout, PlanExecution
from ferrorpc.collectives.fusion import Reduce
from ferrorpc.collectives.outgoing_message import CODED_VALUES, EncodedMessage
from ferrorpc.collectives.polling import DevicePolling
from ferrorpc.collectives.workspace import Rules, Workspace, fitting
from ferrorpc.errors import CodecError
from ferrorpc.guard import Guard
from ferrorpc.kernels.cuda.codecs import DEVICE_CODECS
from ferrorpc.transports.base import Transport
from ferrorpc.transports.mailbox import Box
from ferrorpc.types import DType, ReduceOp, TensorSpec
from ferrorpc.wire.codecs import Codec
from ferrorpc.wire.frames import Frame, Header, Key

OPERATORS: Final = (ReduceOp.SUM, ReduceOp.MEAN)
"""Those that have a kernel."""
AHEAD_CHUNKS: Final = 3
"""Chunks of a message that are encoded and downloaded while the one before them waits to be sent."""

Array = np.ndarray[Any, Any]


def suits(call: Call, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> bool:
    """Whether a compressed call with these arrays can run here: its operator and its codec have kernels, and all of them are on
    one device.

    What its plan does has a kernel anyway: every sum in it is fused (a test holds that for all algorithms that compress).
    """
    arrays = (*inputs, *(outputs or ()))
    has_kernels = call.op in OPERATORS and call.wire in DEVICE_CODECS
    return has_kernels and not any(map(is_host, arrays)) and len({kind_of(array) for array in arrays}) == 1


class Encoding:
    """An encoded chunk: on the device, and its download."""

    __slots__ = ("download", "encoded", "users")

    def __init__(self, encoded: DeviceArray, download: Download, users: int) -> None:
        self.encoded = encoded
        self.download = download
        self.users = users
        """How many actions still have to take it."""


class DeviceWorkspace(Workspace):
    """IN and OUT of one run, on a device."""

    def __init__(self, rules: Rules, inputs: Sequence[DeviceArray], outputs: Sequence[DeviceArray] | None) -> None:
        staging = kind_of(inputs[0]).staging
        self.device: Device = staging.device
        self.caller = self.device.current()
        super().__init__(rules, inputs, outputs)
        self._staging = staging
        self._stream = staging.kernels
        self._kernels = self.device.kernels
        self._device_codec = DEVICE_CODECS[self._codec.name]
        self._chunks: dict[tuple[int, int], Encoding] = {}
        self._uploads: dict[tuple[int, int, int], Upload] = {}
        self._begins: Event = self.caller.record()
        self._begun = False
        self.mark: Event | None = None

    def _room(self, item: int, spec: TensorSpec) -> Any:
        given = fitting(self._given, item, spec)
        return self.device.empty(spec.shape, spec.dtype.storage, self.caller) if given is None else given

    def is_pending(self) -> bool:
        """Whether it waits for the GPU."""
        return not self.has_begun() or not all(each.download.is_complete for each in self._chunks.values())

    def has_begun(self) -> bool:
        """Whether the caller's stream has reached the point of the call."""
        self._begun = self._begun or self._begins.done
        return self._begun

    def advance_downloads(self) -> int:
        """Advances the downloads. Returns how many chunks moved."""
        return sum(each.download.advance() for each in self._chunks.values())

    def encoding(self, index: int, first: int, last: int) -> Encoding:
        """Elements [first, last) of the region of action `index`, encoded once for all actions that send the same."""
        group, users = self._rules.sharing[index]
        found = self._chunks.get((group, first))
        if found is None:
            values = self._flat(self._rules.tasks[index].region)[first:last]
            encoded = self.device.empty((self._codec.encoded_bytes(last - first),), np.dtype(np.uint8), self._stream)
            with self.device.on(self._stream):
                self._device_codec.encode(self._kernels, values, encoded)
                download = self._staging.start_download(encoded)
            found = self._chunks[group, first] = Encoding(encoded, download, users)
        return found

    def _taken(self, index: int, first: int, found: Encoding) -> None:
        """Notes that one of its users has taken it."""
        found.users -= 1
        if not found.users:
            del self._chunks[self._rules.sharing[index][0], first]
            found.download.finish()

    def encoded(self, index: int, first: int, last: int) -> Array:
        found = self.encoding(index, first, last)
        assert found.download.is_complete, f"a chunk of {self._rules.call.signature} was taken before it was downloaded"
        self._taken(index, first, found)
        return found.download.data

    def upload(self, frame: Frame) -> bool:
        """Uploads a received chunk. Returns whether all of it is queued."""
        place = _place(frame)
        upload = self._uploads.get(place)
        if upload is None:
            payload = np.frombuffer(frame.payload, np.uint8)
            with self.device.on(self._stream):
                upload = self._uploads[place] = self._staging.start_upload(is_prompt=True)
            upload.allow(payload, 0, payload.size)
        upload.advance()
        return upload.is_complete

    def uploaded(self, frame: Frame) -> DeviceArray:
        """An uploaded chunk, for kernels launched from now on."""
        upload = self._uploads.pop(_place(frame))
        with self.device.on(self._stream):
            upload.make_stream_wait()
        return upload.target

    def accept(self, action: Receive | Fold | FoldUnder, first: int, data: Any) -> None:
        with self.device.on(self._stream):
            self._device_codec.decode(self._kernels, data, self._flat(action.region)[first : first + CODED_VALUES])

    def reduce(self, task: Reduce, messages: Sequence[Any], first: int, last: int) -> None:
        come = iter(messages)
        with self.device.on(self._stream):
            parts = []
            for operand in task.operands:
                if isinstance(operand, Region):
                    parts.append(self._flat(operand)[first:last])
                    continue
                parts.append(self.device.empty((last - first,), np.dtype(np.float32), self._stream))
                self._device_codec.decode(self._kernels, next(come), parts[-1])
            target = self._flat(task.region)[first:last]
            is_mean = self._rules.call.op is ReduceOp.MEAN
            self._kernels.sum_peers(parts, target, DType.FLOAT32, len(parts) if is_mean else 1)

    def _quantise(self, index: int, first: int, last: int, target: Any) -> None:
        found = self.encoding(index, first, last)
        with self.device.on(self._stream):
            self._device_codec.decode(self._kernels, found.encoded, target)
        self._taken(index, first, found)

    def _compute(self, action: Load | FoldOwn | Finish | Copy, target: Any, source: Any) -> None:
        self.device.copy(target, source, self._stream)

    def close(self, has_succeeded: bool = False) -> None:
        """Launches no more kernels. What those that were launched use is kept until they are done, of abandoned ones too.

        Args:
            has_succeeded: else the caller's stream waits for them, because nobody waits for a result.
        """
        copies: list[Download | Upload] = [*self._uploads.values(), *(each.download for each in self._chunks.values())]
        with ExitStack() as stack:
            stack.callback(self._keep_for_kernels, has_succeeded)
            for each in copies:
                stack.callback(each.finish)
            self._chunks.clear()
            self._uploads.clear()

    def _keep_for_kernels(self, has_succeeded: bool) -> None:
        if self.mark is None:
            self.mark = self._stream.record()
            if not has_succeeded and not self.device.is_captured(self.caller):
                self.caller.wait(self.mark)
            # Memory of a destroyed stream is reused in no order, so the caller's is kept as well.
            self._staging.uploads.keep((self.caller, self._inputs, self._out), self.mark)


class DeviceOutgoing(EncodedMessage):
    """A message whose chunks are encoded on a device, some of them in advance."""

    __slots__ = ("_index", "_workspace")

    def __init__(
        self, workspace: DeviceWorkspace, index: int, peer: int, header: Header, values: DeviceArray, codec: Codec
    ) -> None:
        super().__init__(peer, header, values, codec, partial(workspace.encoded, index))
        self._workspace = workspace
        self._index = index

    def send(self, transport: Transport, key: Key, box: Box, bound: int, room: Callable[[], None]) -> bool:
        ready, limit = True, min(bound, self.count)
        for first in range(self.done, min(limit, self.done + (1 + AHEAD_CHUNKS) * CODED_VALUES), CODED_VALUES):
            last = min(first + CODED_VALUES, self.count)
            if last > limit or (self._refused is not None and self._refused[0] == first):
                continue
            encoding = self._workspace.encoding(self._index, first, last)
            if first == self.done:
                ready = encoding.download.is_complete
        return ready and super().send(transport, key, box, bound, room)


class CompressedDeviceExecution(PlanExecution):
    """One run of a prepared plan whose arrays are on a device. Only the thread that drives it launches anything."""

    _workspace: DeviceWorkspace

    def __init__(self, layout: Layout, key: Key, workspace: DeviceWorkspace, guard: Guard) -> None:
        super().__init__(layout, key, workspace, guard)
        self.polling = DevicePolling(workspace.is_pending)
        self.device = workspace.device
        self._driver = 0
        self._deferred: set[int] = set()
        """Actions whose chunks wait for free pinned memory."""

    def advance(self) -> bool:
        self._driver = threading.get_ident()
        try:
            self.position += self._workspace.advance_downloads()
            over = super().advance()
        finally:
            self._driver = 0
        if over:
            self._workspace.close(has_succeeded=True)
        return over

    def notify(self) -> None:
        if self._driver == threading.get_ident():
            super().notify()
        else:
            self.wake()

    def step(self) -> bool:
        self._entered()
        if not self._workspace.has_begun():
            return False
        self._ready.extend(self._outgoing)
        self._ready.extend(self._deferred)
        self._deferred.clear()
        return super().step()

    def _encoded(self, index: int, peer: int, header: Header, values: Any, codec: Codec) -> EncodedMessage:
        return DeviceOutgoing(self._workspace, index, peer, header, values, codec)

    def _is_usable(self, index: int, frame: Frame) -> bool:
        if self._workspace.upload(frame):
            return True
        self._deferred.add(index)
        return False

    def _part(self, frame: Frame, start: int, end: int, first: int, last: int) -> Any:
        if (start, end) != (first, last):
            raise CodecError(f"{self.label}: chunk at byte {frame.offset} came where element {first} was due")
        self.position += 1
        return self._workspace.uploaded(frame)

    @property
    def waits_for_own_gpu(self) -> bool:
        return self._workspace.is_pending()

    def make_stream_wait(self) -> None:
        if self._workspace.mark is not None:
            self._workspace.device.current().wait(self._workspace.mark)

    def leave(self) -> None:
        super().leave()
        self._workspace.close()


def _place(frame: Frame) -> tuple[int, int, int]:
    return frame.source, frame.header.slot, frame.offset
