"""Results of store writes by request id, which make retries safe, also across a restart of the coordinator."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ferrorpc.v1 import journal_pb2, store_pb2
from ferrorpc_coordinator.state.context import JobContext

TABLE: Final = "write"


class WriteResults:
    """The last results of each client.

    Only writes that changed something are kept: a write that changed nothing may be repeated.
    """

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._clients: dict[str, OrderedDict[int, store_pb2.StoreResponse]] = {}
        self._unary: OrderedDict[str, None] = OrderedDict()
        """Those of unary calls, who last had a result kept last: unlike sessions, they never say that they are gone."""

    def find(self, client: str, request_id: int) -> store_pb2.StoreResponse | None:
        """The result of this request, if it was carried out."""
        results = self._clients.get(client)
        return None if results is None else results.get(request_id)

    def keep(self, client: str, request_id: int, response: store_pb2.StoreResponse) -> None:
        """Keeps a result, in the same step as its write. Request id 0 means that the client will not retry."""
        if request_id == 0:
            return
        self._note(client, request_id, response)
        row = journal_pb2.WriteRow(response=response, revision=self._context.durable_state.revision)
        self._context.put(TABLE, f"{client}/{request_id}", row)
        results = self._clients[client]
        while len(results) > self._context.limits.remembered_writes:
            oldest, _ = results.popitem(last=False)
            self._context.remove(TABLE, f"{client}/{oldest}")
        while len(self._unary) > self._context.limits.remembered_clients:
            self.forget(next(iter(self._unary)))

    def forget(self, client: str) -> None:
        """Forgets a client that will send nothing more."""
        self._unary.pop(client, None)
        for request_id in self._clients.pop(client, ()):
            self._context.remove(TABLE, f"{client}/{request_id}")

    def clients(self) -> list[str]:
        """All clients with a kept result."""
        return list(self._clients)

    def recover(self, rows: dict[str, bytes]) -> None:
        """Restores the results from the journal, oldest first."""
        known = []
        for key, data in rows.items():
            client, request_id = key.rsplit("/", 1)
            row = journal_pb2.WriteRow.FromString(data)
            known.append((row.revision, client, int(request_id), row.response))
        for _, client, number, response in sorted(known, key=lambda item: item[:3]):
            self._note(client, number, response)

    def _note(self, client: str, request_id: int, response: store_pb2.StoreResponse) -> None:
        self._clients.setdefault(client, OrderedDict())[request_id] = response
        if client.startswith("/"):
            self._unary[client] = None
            self._unary.move_to_end(client)
