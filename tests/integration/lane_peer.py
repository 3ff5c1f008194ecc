"""One rank as a process of its own, told on stdin what to do; says on stdout what happens to it.

    python -m tests.integration.lane_peer RANK [BIND ADVERTISE]

It prints "at ADDRESS", reads one line with the addresses of all ranks, and then obeys: `send PEER BYTES`, `probe PEER`,
`stalled PEER` (as the coordinator would report), `close`, `hold SECONDS` (keeps the GIL), `return` (ends the script without
closing anything), `raise`, `fork`.
"""

import ctypes
import itertools
import os
import sys
import threading

import numpy as np

from ferrorpc.guard import SYSTEM_CLOCK, Latch
from ferrorpc.transports.credit import CHUNK_BYTES
from ferrorpc.transports.grpc.server import WorkerServer
from ferrorpc.transports.grpc.transport import GrpcTransport
from ferrorpc.transports.mailbox import Mailbox
from ferrorpc.types import Assignment, DType, Peer
from ferrorpc.wire.frames import Header, Key
from ferrorpc.wire.token import Token

KEY = Key(0, 0, 1)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class PeerProcess:
    def __init__(self, rank: int, bind: str, advertise: str) -> None:
        self.rank = rank
        self.server = WorkerServer(bind, advertise, Token(fixed="secret"))
        say("at", self.server.address)
        addresses = sys.stdin.readline().split()
        peers = tuple(Peer(number, f"m{number}", address=address) for number, address in enumerate(addresses))
        self.mailbox = Mailbox(rank, lambda error: say("failed", type(error).__name__))
        self.latch = Latch()
        self.transport = GrpcTransport(
            self.server,
            Assignment("j", "c", 1, rank, peers),
            self.mailbox,
            self.latch,
            SYSTEM_CLOCK,
            lambda peer, reason: say("lost", peer, reason),
        )
        self.received = dict.fromkeys(range(len(peers)), 0)
        self.box = self.mailbox.enter(KEY, "a()", self.look)
        self.looking = threading.Lock()
        self.slots = itertools.count()

    def look(self) -> None:
        """On the reader's thread: takes what has come, and says so when a message is complete."""
        with self.looking:
            for (source, _), queue in list(self.box.frames.items()):
                while queue:
                    frame = queue.popleft()
                    self.received[source] += len(frame.payload)
                    if self.received[source] == frame.header.total:
                        self.received[source] = 0
                        say("got", frame.header.total, "from", source)

    def send(self, peer: int, size: int) -> None:
        data = np.arange(size, dtype=np.int64).astype(np.uint8)
        header = Header(next(self.slots), "a()", DType.UINT8, (size,), size)
        room = threading.Event()
        for offset in range(0, size, CHUNK_BYTES):
            while not self.transport.send(peer, KEY, header, offset, data[offset : offset + CHUNK_BYTES], room.set):
                room.wait(20)
                room.clear()

    def obey(self, line: str) -> bool:
        word, *rest = line.split()
        if word == "send":
            self.send(int(rest[0]), int(rest[1]))
        elif word == "probe":
            self.transport.probe(int(rest[0]), KEY, "a()")
        elif word == "stalled":
            self.latch.unhealthy[int(rest[0])] = "it is stalled"
        elif word == "close":
            self.transport.close(1.0)
        elif word == "hold":
            ctypes.PyDLL(None).usleep(int(float(rest[0]) * 1e6))
        elif word == "raise":
            raise ValueError("told to")
        elif word == "fork":
            self.fork()
        say("done", word)
        return word != "return"

    def fork(self) -> None:
        """A forked child ends like any process, without a word to its parent's peers."""
        child = os.fork()
        if child == 0:
            sys.exit(0)
        os.waitpid(child, 0)


def main() -> None:
    rank = int(sys.argv[1])
    bind, advertise = sys.argv[2:4] if len(sys.argv) > 2 else ("127.0.0.1", "127.0.0.1")
    peer = PeerProcess(rank, bind, advertise)
    for line in sys.stdin:
        if not peer.obey(line):
            return


if __name__ == "__main__":
    main()
