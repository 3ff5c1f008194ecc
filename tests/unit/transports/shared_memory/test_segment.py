"""A rank's shared memory: what is allocated, found, freed and given back, and what others can do with it."""

import faulthandler
import fcntl
import gc
import itertools
import mmap
import os
import resource
import secrets
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ferrorpc.errors import CodecError, FerroError, GroupClosedError, LimitExceededError
from ferrorpc.transports.shared_memory import segment as segments
from ferrorpc.transports.shared_memory.segment import (
    CONTROL_BYTES,
    CONTROL_OFFSET,
    NONCE_BYTES,
    PAGE_BYTES,
    PUNCH_HOLE_BYTES_MIN,
    SIZE_BYTES_MIN,
    Segment,
    _FreeRanges,
    default_bytes,
    map_peer,
)
from tests.unit.transports.shared_memory.host_worlds import in_a_forked_child

NONCE = bytes(range(NONCE_BYTES))


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment("test", NONCE, SIZE_BYTES_MIN)
    yield made
    made.close()


def seen_by_a_peer(segment: Segment, size_bytes: int | None = None, nonce: bytes = NONCE) -> np.ndarray:
    descriptor = segment.read_only_descriptor()
    try:
        return map_peer(descriptor, segment.size_bytes if size_bytes is None else size_bytes, nonce)
    finally:
        os.close(descriptor)


def pages_held(segment: Segment) -> int:
    """Bytes of memory that the segment takes."""
    descriptor = segment.read_only_descriptor()
    try:
        return os.fstat(descriptor).st_blocks * 512
    finally:
        os.close(descriptor)


def test_what_is_written_is_seen_by_others_at_the_same_offset(segment: Segment) -> None:
    theirs = seen_by_a_peer(segment)
    block = segment.allocate(1000)
    block.array[:] = np.arange(1000) % 251
    np.testing.assert_array_equal(theirs[block.offset : block.offset + 1000], np.arange(1000) % 251)
    segment.memory[CONTROL_OFFSET : CONTROL_OFFSET + 3] = 7, 8, 9
    assert theirs[CONTROL_OFFSET : CONTROL_OFFSET + 4].tolist() == [7, 8, 9, 0]


def test_others_can_only_read(segment: Segment) -> None:
    theirs = seen_by_a_peer(segment)
    assert not theirs.flags.writeable
    descriptor = segment.read_only_descriptor()
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, segment.size_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.ftruncate(descriptor, 4096)
    os.close(descriptor)


def test_nobody_can_take_pages_away_from_under_a_reader(segment: Segment) -> None:
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{segment._descriptor}", 4096)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{segment._descriptor}", 2 * segment.size_bytes)


def test_blocks_are_aligned_apart_and_beyond_the_front(segment: Segment) -> None:
    blocks = [segment.allocate(nbytes) for nbytes in (1, 0, 63, 64, 65, 4097, 3 << 20)]
    assert all(block.offset % 64 == 0 for block in blocks)
    assert blocks[-1].offset % mmap.PAGESIZE == 0
    assert all(block.offset >= CONTROL_OFFSET + CONTROL_BYTES for block in blocks)
    ranges = sorted((block.offset, block.offset + max(1, block.array.size)) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_freed_blocks_are_used_again_and_gaps_join(segment: Segment) -> None:
    blocks = [segment.allocate(1 << 20) for _ in range(60)]
    with pytest.raises(LimitExceededError, match="no 4194304 bytes in a row"):
        segment.allocate(4 << 20)
    for place in (11, 13, 10, 12):
        blocks[place].free()
        blocks[place].free()
    again = segment.allocate(4 << 20)
    assert again.offset == blocks[10].offset
    for block in [*blocks, again]:
        block.free()
    assert segment.used_bytes == 0


def test_random_allocations_never_overlap_and_are_all_given_back() -> None:
    random = np.random.default_rng(3)
    segment = Segment("test", NONCE, SIZE_BYTES_MIN)
    owner = np.zeros(segment.size_bytes // 64, np.int32)
    live = {}
    for number in range(1, 2000):
        if live and random.random() < 0.5:
            block = live.pop(list(live)[random.integers(len(live))])
            owner[block.offset // 64 : -(-(block.offset + block.array.size) // 64)] = 0
            block.free()
        else:
            block = segment.allocate(int(random.integers(1, 1 << int(random.integers(1, 18)))))
            cells = owner[block.offset // 64 : -(-(block.offset + block.array.size) // 64)]
            assert not cells.any()
            cells[:] = number
            live[number] = block
    for block in live.values():
        block.free()
    assert segment.used_bytes == 0
    segment.close()


def test_large_freed_blocks_give_their_pages_back(segment: Segment) -> None:
    block = segment.allocate(8 * PUNCH_HOLE_BYTES_MIN)
    block.array[:] = 1
    held = pages_held(segment)
    block.free()
    assert held - pages_held(segment) == 8 * PUNCH_HOLE_BYTES_MIN


def test_an_array_lives_in_the_segment_until_its_last_view_is_gone(segment: Segment) -> None:
    array = segment.empty((300, 1000), np.dtype(np.float32))
    assert array.shape == (300, 1000)
    assert array.flags.writeable
    assert array.flags.c_contiguous
    used = segment.used_bytes
    assert used >= array.nbytes
    view = array[10:20].T.reshape(-1)[3:].view(np.int32)
    row = array[7].view(np.uint8)
    del array, view
    gc.collect()
    assert segment.used_bytes == used
    del row
    assert segment.used_bytes == 0


def test_an_array_outlives_the_segment(segment: Segment) -> None:
    array = segment.empty((1 << 20,), np.dtype(np.int64))
    theirs = seen_by_a_peer(segment)
    offset = segment.locate(array)
    segment.close()
    array[:] = np.arange(1 << 20)
    assert theirs[offset : offset + array.nbytes].view(np.int64)[-1] == (1 << 20) - 1
    assert array.sum() == (1 << 20) * ((1 << 20) - 1) // 2
    assert segment.locate(array) is None


def test_locate_tells_where_an_array_lies(segment: Segment) -> None:
    array = segment.empty((64, 64), np.dtype(np.float64))
    start = segment.locate(array)
    assert start is not None
    assert start % 64 == 0
    assert segment.locate(array[3:]) == start + 3 * 64 * 8
    assert segment.locate(array.view(np.uint8)) == start
    assert segment.locate(array[:, 1:]) is None
    assert segment.locate(array[::-1]) is None
    assert segment.locate(np.zeros(5)) is None
    frozen = array[5]
    frozen.flags.writeable = False
    assert segment.locate(frozen) == start + 5 * 64 * 8


def test_locate_does_not_take_an_array_that_reaches_beyond_the_end(segment: Segment) -> None:
    assert segment.locate(segment.memory) == 0
    assert segment.locate(segment.memory[-8:]) == segment.size_bytes - 8
    other = Segment("other", NONCE, SIZE_BYTES_MIN)
    assert segment.locate(other.memory) is None
    assert segment.locate(other.empty((3,), np.dtype(np.int8))) is None
    other.close()


def test_arrays_without_elements_lie_nowhere(segment: Segment) -> None:
    array = segment.empty((0, 5), np.dtype(np.float32))
    assert array.shape == (0, 5)
    assert segment.used_bytes == 0


def test_a_finaliser_may_run_while_the_allocator_works(segment: Segment) -> None:
    block = segment.allocate(64)
    with segment._lock:
        block.free()
    assert segment.used_bytes == 0


def test_an_interrupt_while_memory_is_taken_does_not_take_the_rest(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing could be allocated any more, until the end of the generation."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    free = segment.size_bytes - segment.used_bytes
    with monkeypatch.context() as patch:
        patch.setattr(_FreeRanges, "give", interrupted)
        with pytest.raises(KeyboardInterrupt):
            segment.empty((100,), np.dtype(np.uint8))
    assert segment.size_bytes - segment.used_bytes >= free - PAGE_BYTES


def test_threads_may_allocate_and_free(segment: Segment) -> None:
    wrong = []

    def work(number: int) -> None:
        for _ in range(300):
            array = segment.empty((257,), np.dtype(np.int32))
            array[:] = number
            if (array != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert segment.used_bytes == 0


def test_what_is_freed_after_the_end_stays_for_peers_that_still_read_it(segment: Segment) -> None:
    block, theirs = segment.allocate(PUNCH_HOLE_BYTES_MIN), seen_by_a_peer(segment)
    block.array[:] = 1
    segment.close()
    block.free()
    assert theirs[block.offset : block.offset + PUNCH_HOLE_BYTES_MIN].all()


def test_the_descriptor_is_closed_with_the_last_array(segment: Segment) -> None:
    array, descriptor = segment.empty((4,), np.dtype(np.int32)), segment._descriptor
    segment.close()
    assert os.fstat(descriptor).st_size == SIZE_BYTES_MIN
    del array
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_program_that_is_started_does_not_get_the_memory(segment: Segment) -> None:
    descriptor = segment.read_only_descriptor()
    assert [os.get_inheritable(each) for each in (segment._descriptor, descriptor)] == [False, False]
    os.close(descriptor)


def test_a_closed_segment_refuses(segment: Segment) -> None:
    segment.close()
    segment.close()
    with pytest.raises(GroupClosedError):
        segment.allocate(1)


def test_what_has_no_room_is_refused(segment: Segment) -> None:
    with pytest.raises(LimitExceededError):
        segment.allocate(segment.size_bytes)


def test_the_usual_size_fits_beside_all_others() -> None:
    assert default_bytes(1) >= 2 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE or default_bytes(1) < 1 << 46
    assert default_bytes(4096) * 4096 <= 1 << 46


def test_what_the_system_does_not_grant_is_tried_smaller_and_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = Segment("test", NONCE, 1 << 48)
    assert SIZE_BYTES_MIN <= segment.size_bytes < 1 << 48
    segment.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_segment_without_room_for_its_front_is_not_mapped() -> None:
    descriptor = os.memfd_create("small", os.MFD_ALLOW_SEALING)
    os.write(descriptor, NONCE.ljust(CONTROL_OFFSET, b"\0"))
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(CodecError, match="were announced"):
        map_peer(descriptor, CONTROL_OFFSET, NONCE)
    os.close(descriptor)


def foreign(kind: str) -> int:
    """A descriptor that is no segment."""
    if kind == "pipe":
        reading, writing = os.pipe()
        os.close(writing)
        return reading
    descriptor = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.truncate(f"/proc/self/fd/{descriptor}", SIZE_BYTES_MIN)
    os.write(descriptor, NONCE)
    return descriptor


@pytest.mark.parametrize("kind", ["pipe", "not sealed"])
def test_what_is_no_segment_is_not_mapped(kind: str) -> None:
    descriptor = foreign(kind)
    with pytest.raises(CodecError):
        map_peer(descriptor, SIZE_BYTES_MIN, NONCE)
    os.close(descriptor)


def test_a_segment_of_another_size_or_secret_is_not_believed(segment: Segment) -> None:
    with pytest.raises(CodecError, match="were announced"):
        seen_by_a_peer(segment, size_bytes=segment.size_bytes - mmap.PAGESIZE)
    with pytest.raises(CodecError, match="secret"):
        seen_by_a_peer(segment, nonce=secrets.token_bytes(NONCE_BYTES))


@pytest.mark.parametrize("is_over", [False, True])
def test_what_a_forked_child_writes_is_its_own(is_over: bool, segment: Segment) -> None:
    array = segment.empty((1 << 19,), np.dtype(np.int32))
    array[:] = 5
    theirs, offset = seen_by_a_peer(segment), segment.locate(array)
    if is_over:
        segment.close()

    def child() -> bool:
        whole = bool((array == 5).all())
        array[:] = 6
        return whole and in_a_forked_child(lambda: bool((array == 6).all())) == 0

    assert in_a_forked_child(child) == 0
    assert (array == 5).all()
    assert (theirs[offset : offset + array.nbytes].view(np.int32) == 5).all()


def test_a_forked_child_maps_nothing_where_its_parent_has_no_segment_any_more(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped: list[int] = []
    libc = SimpleNamespace(mmap=lambda address, *_: mapped.append(address), mprotect=lambda *_: None)
    monkeypatch.setattr(segments, "_libc", libc)
    segment.close()
    assert in_a_forked_child(lambda: segment.address not in mapped) == 0


def test_a_child_may_be_forked_while_a_thread_allocates(segment: Segment) -> None:
    with segment._lock:
        assert in_a_forked_child(lambda: segment.memory.size == 0) == 0


def test_a_forked_child_frees_nothing_of_its_parents(segment: Segment) -> None:
    arrays = [segment.empty((PUNCH_HOLE_BYTES_MIN,), np.dtype(np.uint8))]
    arrays[0][:] = 9

    def child() -> bool:
        arrays.clear()
        gc.collect()
        try:
            segment.allocate(1)
        except FerroError as error:
            return isinstance(error, GroupClosedError)
        return False

    assert in_a_forked_child(child) == 0
    assert (arrays[0] == 9).all()


def test_a_forked_child_that_gets_no_memory_of_its_own_cannot_write(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    array = segment.empty((4,), np.dtype(np.int32))
    array[:] = 5
    monkeypatch.setattr(segments, "_libc", SimpleNamespace(mmap=lambda *_: None, mprotect=segments._libc.mprotect))
    assert in_a_forked_child(lambda: bool((array == 5).all())) == 0
    assert in_a_forked_child(lambda: (faulthandler.disable(), array.fill(6)) is None) == -signal.SIGSEGV
    assert (array == 5).all()


def test_the_memory_of_a_world_is_in_no_core_dump(segment: Segment) -> None:
    theirs = seen_by_a_peer(segment)
    for address in (segment.address, theirs.ctypes.data):
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"\n{address:x}-")
        assert "dd" in mapping.partition("VmFlags:")[2].partition("\n")[0].split()


def test_a_world_takes_half_of_the_address_space_that_a_process_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 30
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert default_bytes(8) * 8 <= limit // 2
    assert default_bytes(4096) == SIZE_BYTES_MIN
