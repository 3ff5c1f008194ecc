"""send and recv of a group, as training code calls them, and the state that all operations of a group share."""

from __future__ import annotations

from typing import Any, Unpack, overload

from numpy.typing import NDArray

from ferrorpc.arrays.device import is_host
from ferrorpc.arrays.kinds import NUMPY
from ferrorpc.backends.base import Backend
from ferrorpc.collectives.ranks_and_tags import peer_of, tag_of
from ferrorpc.collectives.small_messages import SmallReceive
from ferrorpc.errors import FerroError
from ferrorpc.guard import seconds_of
from ferrorpc.operations.arguments import Arguments, check_sendable
from ferrorpc.operations.device_fast_path import DeviceFastPath
from ferrorpc.operations.dispatch import Dispatch
from ferrorpc.operations.expected import Expected
from ferrorpc.operations.fast_path import FastPath
from ferrorpc.operations.results import Into
from ferrorpc.operations.type_hints import A, Array, Later, Now, Readable, Timed
from ferrorpc.work import Work


class PointToPoint:
    """send and recv of a group.

    Args:
        backend: performs the operations.
        timeout: default timeout of an operation, in seconds.
    """

    def __init__(self, backend: Backend, timeout: float) -> None:
        self._backend = backend
        self._dispatch = Dispatch(backend, timeout)
        self._rank = backend.rank
        self._size = backend.size
        self._arguments = Arguments(backend.capabilities.device_arrays)
        is_observed = self._dispatch.telemetry is not None
        self._fast_path = None if is_observed or backend.arena is None else FastPath(self._dispatch, backend.arena)
        self._small_messages = None if is_observed else backend.small_messages
        self._device_fast_path = DeviceFastPath(self._dispatch) if backend.capabilities.device_moves else None

    @property
    def timeout(self) -> float:
        """Seconds an operation may take where none are given."""
        return self._dispatch.timeout

    @overload
    def send(self, x: Array | Readable, dst: int, tag: int = ..., *, async_op: Now = ..., **options: Unpack[Timed]) -> None: ...
    @overload
    def send(
        self, x: Array | Readable, dst: int, tag: int = ..., *, async_op: Later, **options: Unpack[Timed]
    ) -> Work[None]: ...
    def send(self, x: Any, dst: int, tag: int = 0, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Sends an array to rank `dst`. Returns, or the Work is done, when x may be changed again; receipt is not implied.

        The part of a message beyond 4 MiB is sent only once rank `dst` is in its recv. So where two ranks exchange arrays, each
        sends with `async_op=True`, receives, and then waits.

        Raises:
            CollectiveTimeoutError: x may not be changed yet after the timeout. The generation has ended: a part of the message
                may have been sent.
            SelfSendError: `dst` is this rank.
            GroupClosedError: the group was closed; or rank `dst` has closed this subgroup, and so never receives that part.
        """
        peer, tag, source = peer_of(dst, self._rank, self._size, "dst"), tag_of(tag), self._arguments.view(x)
        check_sendable([source.spec])
        seconds = seconds_of(timeout, self.timeout)
        self._dispatch.check_open()
        small, execution = self._small_messages, None
        try:
            try:
                if small is not None and small.send(source.data, source.spec, peer, tag):
                    return self._dispatch.sent(small.label_of_send(source.spec, peer, tag), async_op)
            except Exception as error:  # noqa: BLE001  nobody knows whether it was sent: the general path reports it
                execution = self._backend.start_send(source.data, source.spec, peer, tag, self._dispatch.guard(seconds))
                execution.begin_failed(error)
            else:
                execution = self._backend.start_send(source.data, source.spec, peer, tag, self._dispatch.guard(seconds))
            return self._dispatch.send(execution, async_op)
        except BaseException as error:
            self._dispatch.struck(f"send(dst={dst}, tag={tag})", error, execution)
            raise

    @overload
    def recv(self, src: int, tag: int, out: A, timeout: float | None = ..., *, async_op: Now = ...) -> A: ...
    @overload
    def recv(self, src: int, tag: int, out: A, timeout: float | None = ..., *, async_op: Later) -> Work[A]: ...
    @overload
    def recv(self, src: int, tag: int = ..., *, out: A, timeout: float | None = ..., async_op: Now = ...) -> A: ...
    @overload
    def recv(self, src: int, tag: int = ..., *, out: A, timeout: float | None = ..., async_op: Later) -> Work[A]: ...
    @overload
    def recv(
        self, src: int, tag: int = ..., out: None = ..., timeout: float | None = ..., *, async_op: Now = ...
    ) -> NDArray[Any]: ...
    @overload
    def recv(
        self, src: int, tag: int = ..., out: None = ..., timeout: float | None = ..., *, async_op: Later
    ) -> Work[NDArray[Any]]: ...
    def recv(self, src: int, tag: int = 0, out: Any = None, timeout: float | None = None, *, async_op: bool = False) -> Any:
        """The next array that rank `src` sent with this tag, first in, first out; a NumPy array unless `out` is given.

        Raises:
            CollectiveTimeoutError: nothing came in time. Nothing is lost or broken: call it again.
            TensorMismatchError: `out` does not fit; the message stays for the next recv.
            SelfSendError: `src` is this rank.
            GroupClosedError: the group was closed; or rank `src` has closed this subgroup, and so sends nothing more.
            PeerLostError: rank `src` has left, by close() or reform(), and so sends nothing more. The group goes on, unless
                it left before this rank first had a connection to it.

        Whether rank `src` sends nothing more is asked while a recv waits, so not by one with a timeout of 0. A Work that ends
        for this reason, and that nobody looks at, is not logged.
        """
        peer, tag = peer_of(src, self._rank, self._size, "src"), tag_of(tag)
        result = self._arguments.one_result(out, NUMPY, None, [])
        seconds = seconds_of(timeout, self.timeout)
        self._dispatch.check_open()
        target, spec = (result.outs[0].data, result.outs[0].spec) if isinstance(result, Into) else (None, None)
        messages = None if async_op or not (target is None or is_host(target)) else self._small_messages
        polled_in_vain = False
        if messages is not None:
            small = SmallReceive(messages, peer, tag)
            try:
                if small.has_come(spec):
                    self._dispatch.note(small.label)
                    found = result.give([small.copy(target)], [small.spec], small.label)
                    small.take()
                    return found
                polled_in_vain = small.message is None
                small.put_back()
            except BaseException:
                small.put_back()
                raise
        guard = self._dispatch.guard_of_recv(seconds)
        execution = self._backend.start_recv(peer, tag, target, spec, guard)
        execution.has_polled = polled_in_vain
        if async_op:
            self._dispatch.let_events_advance(execution)  # it takes its place in the queue now
        try:
            return self._dispatch.finish(execution, result, async_op)
        except BaseException as error:
            if not async_op:
                execution.give_back()  # also a message that was taken, but not made into a result
            elif not isinstance(error, FerroError):  # nobody has its Work, and it takes the next message all the same
                self._dispatch.interrupted(execution.label, error)
                execution.finish()
            raise

    def expect(self, src: int, tag: int = 0, awaited: object = None) -> Expected:
        """A recv whose place in the queue is taken now; its caller waits with `take`, when it needs the array.

        Args:
            awaited: what explanations call the message, such as where the wait for it is long; None for a recv with this tag.
        """
        return Expected(self._dispatch, peer_of(src, self._rank, self._size, "src"), tag_of(tag), awaited)
