"""What ranks tell of themselves and of one another has its limits, and none of them keeps a world from coming about."""

import socket
import threading
import uuid
from dataclasses import replace

from ferrorpc.config import NAME_BYTES_MAX
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.guard import Latch, SystemClock
from ferrorpc.transports.shared_memory import discovery, handshake
from ferrorpc.transports.shared_memory.segment import NONCE_BYTES, SIZE_BYTES_MIN, Segment
from ferrorpc.types import Assignment

SECONDS = 20.0
PAYLOAD_BYTES_MAX = 4096
"""Of a barrier, by which verdicts are exchanged."""


def assignment() -> Assignment:
    return LocalWorld(2).session(0).membership.assignment


def test_a_verdict_fits_into_its_exchange_however_many_ranks_failed() -> None:
    failures = {rank: f"rank {rank} has not greeted within 5 s" for rank in range(200)}
    assert discovery._verdict({}, failures).ByteSize() < PAYLOAD_BYTES_MAX


def test_the_longest_name_of_a_job_keeps_nobody_from_sharing_memory() -> None:
    local = discovery._LocalOffer(replace(assignment(), job="j" * NAME_BYTES_MAX), "auto")
    local.close()
    assert local.offer.refusal == ""


def test_a_rank_whose_socket_takes_nobody_more_is_given_up() -> None:
    segment, mine = Segment("test", bytes(NONCE_BYTES), SIZE_BYTES_MIN), replace(assignment(), rank=1)
    name = f"ferrorpc/test/{uuid.uuid4()}"
    with handshake.listen(name) as full, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        full.listen(0)
        stranger.connect("\0" + name)
        with handshake.listen(f"{name}/1") as listener:
            handshaker = handshake.Handshaker(mine, (0, 1), [discovery.SharedMemoryOffer(socket=name)], listener, segment)
            dialling = threading.Thread(target=handshaker.run, args=(Latch(), SystemClock(), 0.1), daemon=True)
            dialling.start()
            dialling.join(SECONDS)
            assert not dialling.is_alive()
    segment.close()
    assert "rank 0 cannot be reached over a Unix socket" in handshaker.failures[0]
