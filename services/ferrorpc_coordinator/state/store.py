"""The job's store: requests, waiting for keys, and retries that take effect once."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from ferrorpc.errors import (
    MessageTooLargeError,
    StaleGenerationError,
    StoreTimeoutError,
    UsageError,
    require,
)
from ferrorpc.v1 import store_pb2
from ferrorpc.wire.error_detail import detail_of
from ferrorpc.wire.limits import VALID_KEY, sum_of
from ferrorpc_coordinator.state.context import JobContext, Requester
from ferrorpc_coordinator.state.generations import Generations
from ferrorpc_coordinator.state.keyspace import Entry, Keyspace
from ferrorpc_coordinator.state.settings import MILLISECOND, format_seconds
from ferrorpc_coordinator.state.watches import Watches
from ferrorpc_coordinator.state.write_results import WriteResults


@dataclass(frozen=True, slots=True)
class _Operation:
    """One of the oneof `operation` of a request.

    Attributes:
        run: carries it out. Returns None where it answers later, or by itself.
        writes: its result is kept, so that a request that is repeated has no second effect.
        grows: it enlarges the journal.
        answers_little: its answer is small, whatever the store holds.
    """

    run: Callable[[Store, Requester, Any], store_pb2.StoreResponse | None]
    writes: bool = False
    grows: bool = False
    answers_little: bool = False


def sets_a_value(request: store_pb2.StoreRequest) -> bool:
    """Whether a request contains a value, so that it may be as large as one."""
    name = request.WhichOneof("operation")
    return name is not None and "value" in getattr(request, name).DESCRIPTOR.fields_by_name


def writes_or_waits(request: store_pb2.StoreRequest) -> bool:
    """Whether a request may leave something in a job that is empty."""
    name = request.WhichOneof("operation")
    return name is not None and (_OPERATIONS[name].grows or name == "wait" or request.get.wait_ms > 0)


def may_answer_much(request: store_pb2.StoreRequest) -> bool:
    """Whether the answer to a request may be large."""
    name = request.WhichOneof("operation")
    return name is None or not _OPERATIONS[name].answers_little


@dataclass(slots=True, eq=False)
class Waiter:
    """A request that waits until its keys exist."""

    requester: Requester
    keys: tuple[str, ...]
    missing: set[str]
    since: int
    wants_value: bool

    @property
    def owner(self) -> str | int:
        """With whose end the wait ends: a session's client, or the number of a unary call."""
        return self.requester.number if self.requester.member is None else self.requester.client


class Store:
    """The store of one job."""

    def __init__(self, context: JobContext, generations: Generations) -> None:
        self._context = context
        self._generations = generations
        self.keyspace = Keyspace(context)
        self.write_results = WriteResults(context)
        self.watches = Watches(context)
        self._waiting: dict[str, dict[Waiter, None]] = {}
        """Key -> the waiters that miss this key, in the order in which they came."""
        self._waiters_of: dict[str | int, dict[Waiter, None]] = {}
        """Owner -> its waiters."""
        self._waited_keys = 0
        """The number of missing keys of all waiters together."""

    def request(self, requester: Requester, request: store_pb2.StoreRequest) -> None:
        """Answers a request, at once or when its keys exist.

        Raises:
            UsageError, LimitExceededError: nothing has changed.
        """
        name = request.WhichOneof("operation")
        if name is None:
            raise UsageError("a store request without an operation, or with one that this coordinator does not know")
        kind, operation = _OPERATIONS[name], getattr(request, name)
        if kind.writes and (known := self.write_results.find(requester.client, request.request_id)) is not None:
            self._context.answer(requester, self._completed(known, name, operation))
            return
        if kind.grows:
            self._context.require_disk(f"the store refuses {name}")
        before = self._context.durable_state.revision
        response = kind.run(self, requester, operation)
        if response is None:
            return
        if kind.writes and self._context.durable_state.revision != before:
            kept = store_pb2.StoreResponse(found=response.found, number=response.number, revision=response.revision)
            self.write_results.keep(requester.client, request.request_id, kept)
        self._context.answer(requester, response)

    def client_gone(self, client: str) -> None:
        """A session is over: deletes the keys bound to it, and drops its waits and write results."""
        self.delete_bound(client)
        self.write_results.forget(client)
        self.stop_waiting(client)

    def delete_bound(self, what: str | int) -> None:
        """A session (by its client) or a generation is over: deletes the keys bound to it."""
        for key in self.keyspace.bound_to(what):
            self._remove(key)

    def stop_waiting(self, owner: str | int) -> None:
        """A session (by its client) is over, or the caller of a unary call has gone: drops its waits."""
        for waiter in list(self._waiters_of.get(owner, ())):
            self._give_up(waiter)

    def recover(self, entries: dict[str, bytes], writes: dict[str, bytes], living: Set[str]) -> None:
        """Restores the store from the journal. Deletes what belongs to clients that are not among the living."""
        self.keyspace.recover(entries)
        self.watches.forget_until(self._context.durable_state.revision)
        self.write_results.recover(writes)
        newest = self._generations.newest
        for what in self.keyspace.bindings():
            if what not in living and (newest.over or what != newest.number):
                self.delete_bound(what)
        for client in self.write_results.clients():
            if not client.startswith("/") and client not in living:
                self.write_results.forget(client)

    def erase(self) -> None:
        """Deletes all keys, their history and kept results."""
        self.watches.forget_until(self._context.durable_state.revision)
        keys, _ = self.keyspace.page("", "", self._context.limits.store_bytes)
        for key in reversed(keys):  # from the end of the sorted keys, where a deletion moves no others
            self.keyspace.delete(key)
        for client in self.write_results.clients():
            self.write_results.forget(client)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _set(self, requester: Requester, operation: store_pb2.SetOperation) -> store_pb2.StoreResponse:
        entry = self._write(requester, operation.key, operation.value, operation.binding)
        return store_pb2.StoreResponse(found=True, revision=entry.revision)

    def _add(self, requester: Requester, operation: store_pb2.AddOperation) -> store_pb2.StoreResponse:
        entry = self.keyspace.get(self._valid_key(operation.key))
        total = sum_of(operation.key, b"0" if entry is None else entry.value, operation.amount)
        written = self._write(requester, operation.key, str(total).encode(), operation.binding, entry)
        return store_pb2.StoreResponse(found=True, number=total, revision=written.revision)

    def _compare_set(self, requester: Requester, operation: store_pb2.CompareSetOperation) -> store_pb2.StoreResponse:
        entry = self.keyspace.get(self._valid_key(operation.key))
        matches = (
            operation.expect_absent if entry is None else not operation.expect_absent and entry.value == operation.expected
        )
        if not matches:
            held = Entry(b"", 0) if entry is None else entry
            return store_pb2.StoreResponse(found=False, value=held.value, revision=held.revision)
        written = self._write(requester, operation.key, operation.value, operation.binding, entry)
        return store_pb2.StoreResponse(found=True, value=written.value, revision=written.revision)

    def _delete(self, requester: Requester, operation: store_pb2.DeleteOperation) -> store_pb2.StoreResponse:
        if self.keyspace.get(self._valid_key(operation.key)) is None:
            return store_pb2.StoreResponse(found=False)
        return store_pb2.StoreResponse(found=True, revision=self._remove(operation.key))

    def _get(self, requester: Requester, operation: store_pb2.GetOperation) -> store_pb2.StoreResponse | None:
        entry = self.keyspace.get(self._valid_key(operation.key))
        if entry is not None:
            return store_pb2.StoreResponse(found=True, value=entry.value, revision=entry.revision)
        if operation.wait_ms:
            self._add_waiter(requester, (operation.key,), operation.wait_ms, wants_value=True)
            return None
        return store_pb2.StoreResponse(found=False)

    def _wait(self, requester: Requester, operation: store_pb2.WaitOperation) -> store_pb2.StoreResponse | None:
        keys = tuple(dict.fromkeys(self._valid_key(key) for key in operation.keys))
        if all(self.keyspace.get(key) is not None for key in keys):
            return store_pb2.StoreResponse(found=True)
        self._add_waiter(requester, keys, operation.wait_ms, wants_value=False)
        return None

    def _keys(self, requester: Requester, operation: store_pb2.KeysOperation) -> store_pb2.StoreResponse:
        keys, more = self.keyspace.page(operation.prefix, operation.after, self._context.limits.page_bytes)
        return store_pb2.StoreResponse(found=bool(keys), keys=keys, more=more)

    def _watch(self, requester: Requester, operation: store_pb2.WatchOperation) -> None:
        """Answers by itself, before the changes that it sends. The answer is not kept for a repeated request: that comes on
        another stream, and this watch ends with its own."""
        stream = None if requester.member is None else requester.member.stream
        if stream is None:
            raise UsageError("a watch needs a session: its events have nowhere else to go")
        require("the length of a watch's prefix", len(operation.prefix.encode()), "key_bytes", self._context.limits.key_bytes)
        watch = self.watches.add(stream, operation.prefix)
        response = store_pb2.StoreResponse(found=True, watch_id=watch.number, revision=self._context.durable_state.revision)
        self._context.answer_many([requester], response)
        if operation.from_revision:
            self.watches.replay(watch, operation.from_revision)

    def _unwatch(self, requester: Requester, operation: store_pb2.UnwatchOperation) -> store_pb2.StoreResponse:
        member = requester.member
        return store_pb2.StoreResponse(found=member is not None and self.watches.remove(member.stream, operation.watch_id))

    # -- changes -------------------------------------------------------------------------------------------------------

    def _write(self, requester: Requester, key: str, value: bytes, binding: int, changed: Entry | None = None) -> Entry:
        """Sets a key. The entry that the operation changes, if it is one that changes a value, keeps its binding by default."""
        most = self._context.limits.value_bytes
        require(f"the value of {self._valid_key(key)!r}", len(value), "value_bytes", most, MessageTooLargeError)
        if changed is not None and binding == store_pb2.KEY_BINDING_UNSPECIFIED:
            bound_to = changed.bound_to
        else:
            bound_to = self._bound_to(requester, binding)
        entry = self.keyspace.set(key, value, bound_to)
        self.watches.changed(key, value, entry.revision)
        self._wake_waiters(key, entry)
        return entry

    def _bound_to(self, requester: Requester, binding: int) -> str | int:
        if binding in (store_pb2.KEY_BINDING_UNSPECIFIED, store_pb2.KEY_BINDING_JOB):
            return 0
        if requester.member is None:
            raise UsageError("a unary call can bind a key only to the job, not to a session or a generation")
        if binding == store_pb2.KEY_BINDING_SESSION:
            return requester.client
        if binding != store_pb2.KEY_BINDING_GENERATION:
            raise UsageError(f"this coordinator does not know the binding {binding} of a key")
        if requester.member.rank < 0:
            raise StaleGenerationError(f"{requester} is in no generation that a key could be bound to")
        return self._generations.require(requester.member, requester.member.generation).number

    def _remove(self, key: str) -> int:
        revision = self.keyspace.delete(key)
        self.watches.changed(key, b"", revision, deleted=True)
        return revision

    def _completed(self, kept: store_pb2.StoreResponse, name: str, operation: Any) -> store_pb2.StoreResponse:
        """A kept result, with the value that was left out because the request contains it."""
        response = store_pb2.StoreResponse()
        response.CopyFrom(kept)
        if name == "compare_set":
            response.value = operation.value
        return response

    def _valid_key(self, key: str) -> str:
        require("the key's length", len(key), "key_bytes", self._context.limits.key_bytes)
        if not VALID_KEY.fullmatch(key):
            text = f"key {key[:64]!r} is not made of printable ASCII without blanks"
            raise UsageError(text, hint="use keys such as 'run/lr'")
        return key

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _add_waiter(self, requester: Requester, keys: tuple[str, ...], wait_ms: int, wants_value: bool) -> None:
        missing = {key for key in keys if self.keyspace.get(key) is None}
        what, most = f"keys for which requests of job {self._context.job} wait", self._context.limits.waited_keys
        require(what, self._waited_keys + len(missing), "waited_keys", most)
        waiter = Waiter(requester, keys, missing, self._context.now, wants_value)
        self._waiters_of.setdefault(waiter.owner, {})[waiter] = None
        self._wait_for_missing(waiter)
        self._context.arm(("wait", waiter), self._context.now + wait_ms * MILLISECOND, partial(self._time_out, waiter))

    def _wake_waiters(self, key: str, entry: Entry) -> None:
        readers: list[Requester] = []
        for waiter in list(self._waiting.get(key, ())):
            self._remove_waiter(waiter, key)
            if waiter.missing or self._still_missing(waiter):
                continue
            self._end(waiter)
            if waiter.wants_value:
                readers.append(waiter.requester)
            else:
                self._context.answer(waiter.requester, store_pb2.StoreResponse(found=True))
        if readers:
            response = store_pb2.StoreResponse(found=True, value=entry.value, revision=entry.revision)
            self._context.answer_many(readers, response, keep=True)

    def _still_missing(self, waiter: Waiter) -> bool:
        """Waits again for keys that were deleted while the request waited for others; returns whether any are missing."""
        waiter.missing.update(key for key in waiter.keys if self.keyspace.get(key) is None)
        self._wait_for_missing(waiter)
        return bool(waiter.missing)

    def _wait_for_missing(self, waiter: Waiter) -> None:
        self._waited_keys += len(waiter.missing)
        for key in waiter.missing:
            self._waiting.setdefault(key, {})[waiter] = None

    def _time_out(self, waiter: Waiter) -> None:
        missing = sorted(waiter.missing)
        self._give_up(waiter)
        waited = format_seconds(self._context.now - waiter.since)
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        error = StoreTimeoutError(f"{waiter.requester} waited {waited} for {shown} in the store", missing=missing[:64])
        self._context.answer(waiter.requester, detail_of(error))

    def _give_up(self, waiter: Waiter) -> None:
        self._end(waiter)
        for key in list(waiter.missing):
            self._remove_waiter(waiter, key)

    def _end(self, waiter: Waiter) -> None:
        self._context.disarm(("wait", waiter))
        others = self._waiters_of[waiter.owner]
        del others[waiter]
        if not others:
            del self._waiters_of[waiter.owner]

    def _remove_waiter(self, waiter: Waiter, key: str) -> None:
        waiter.missing.discard(key)
        self._waited_keys -= 1
        waiting = self._waiting[key]
        del waiting[waiter]
        if not waiting:
            del self._waiting[key]


_OPERATIONS: Final = {
    "set": _Operation(Store._set, writes=True, grows=True, answers_little=True),
    "get": _Operation(Store._get),
    "add": _Operation(Store._add, writes=True, grows=True, answers_little=True),
    "compare_set": _Operation(Store._compare_set, writes=True, grows=True),
    "wait": _Operation(Store._wait),
    "delete": _Operation(Store._delete, writes=True, answers_little=True),
    "keys": _Operation(Store._keys),
    "watch": _Operation(Store._watch),
    "unwatch": _Operation(Store._unwatch),
}
