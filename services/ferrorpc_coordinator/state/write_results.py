"""Results of writes by request id: what makes a retry safe, also across a restart of the coordinator."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ferrorpc.v1 import journal_pb2, store_pb2
from ferrorpc_coordinator.state.context import JobContext

TABLE: Final = "write"


class WriteResults:
    """The last results of each client, and the last clients. Only writes that changed something are kept: a repeated one
    that changed nothing the first time may as well be carried out again, since nobody has seen its answer."""

    def __init__(self, context: JobContext) -> None:
        self._context = context
        self._clients: OrderedDict[str, OrderedDict[int, store_pb2.StoreResponse]] = OrderedDict()

    def find(self, client: str, request_id: int) -> store_pb2.StoreResponse | None:
        """The result of this request, if it was carried out."""
        results = self._clients.get(client)
        return None if results is None else results.get(request_id)

    def keep(self, client: str, request_id: int, response: store_pb2.StoreResponse) -> None:
        """Keeps a result with the write it belongs to. Request id 0 asks for no protection."""
        if request_id == 0:
            return
        self._note(client, request_id, response)
        row = journal_pb2.WriteRow(response=response, revision=self._context.durable_state.revision)
        self._context.put(TABLE, f"{client}/{request_id}", row)
        results = self._clients[client]
        while len(results) > self._context.limits.remembered_writes:
            oldest, _ = results.popitem(last=False)
            self._context.remove(TABLE, f"{client}/{oldest}")
        while len(self._clients) > self._context.limits.remembered_clients + self._context.limits.members:
            self.forget(next(iter(self._clients)))

    def forget(self, client: str) -> None:
        """The client is gone for good and will repeat nothing."""
        for request_id in self._clients.pop(client, ()):
            self._context.remove(TABLE, f"{client}/{request_id}")

    def clients(self) -> list[str]:
        """Everyone with a kept result."""
        return list(self._clients)

    def recover(self, rows: dict[str, bytes]) -> None:
        """Takes back what was durable, oldest first."""
        known = []
        for key, data in rows.items():
            client, request_id = key.rsplit("/", 1)
            row = journal_pb2.WriteRow.FromString(data)
            known.append((row.revision, client, int(request_id), row.response))
        for _, client, number, response in sorted(known, key=lambda item: item[:3]):
            self._note(client, number, response)

    def _note(self, client: str, request_id: int, response: store_pb2.StoreResponse) -> None:
        self._clients.setdefault(client, OrderedDict())[request_id] = response
        self._clients.move_to_end(client)
