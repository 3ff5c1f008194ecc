"""What every store does, wherever its values are."""

import itertools
import threading
from array import array
from collections.abc import Iterator

import pytest

from ferrorpc.coordination.base import Session, Store
from ferrorpc.coordination.local import LocalWorld
from ferrorpc.errors import LimitExceededError, MessageTooLargeError, StoreTimeoutError, UsageError
from tests.integration.coordinator_process import CoordinatorProcess
from tests.integration.members import join_all
from tests.threads import together

_jobs = itertools.count()


@pytest.fixture(scope="module")
def service() -> Iterator[CoordinatorProcess]:
    service = CoordinatorProcess()
    yield service
    service.stop()


@pytest.fixture(params=["local", "remote"])
def sessions(request: pytest.FixtureRequest) -> Iterator[list[Session]]:
    """Those of two members of one job."""
    if request.param == "local":
        yield list(LocalWorld(2).sessions)
        return
    members = join_all(request.getfixturevalue("service").address, 2, job=f"store-{next(_jobs)}")
    yield members
    together([member.leave for member in members])


@pytest.fixture
def stores(sessions: list[Session]) -> list[Store]:
    """The store as two members of one job see it."""
    return [session.store for session in sessions]


def test_a_value_set_by_one_is_read_by_the_other(stores):
    ours, theirs = stores
    ours.set("key", b"\x00value\xff")
    assert theirs.get("key") == b"\x00value\xff"
    theirs.set("key", b"")
    assert ours.get("key", timeout=0) == b""


def test_get_waits_for_the_key(stores):
    ours, theirs = stores
    timer = threading.Timer(0.1, lambda: theirs.set("late", b"here"))
    timer.start()
    assert ours.get("late", timeout=20) == b"here"
    timer.join()


@pytest.mark.parametrize("seconds", [0, 0.05])
def test_a_key_nobody_sets_is_a_timeout_that_names_it(stores, seconds):
    with pytest.raises(StoreTimeoutError, match="nobody-sets-this"):
        stores[0].get("nobody-sets-this", timeout=seconds)


def test_wait_returns_when_every_key_exists_and_names_those_that_do_not(stores):
    ours, theirs = stores
    theirs.set("a", b"1")
    with pytest.raises(StoreTimeoutError) as caught:
        ours.wait(["a", "b", "c"], timeout=0.05)
    assert caught.value.fields["missing"] == ["b", "c"]
    assert "b, c" in str(caught.value).replace("'", "")
    timer = threading.Timer(0.1, lambda: (theirs.set("b", b""), theirs.set("c", b"")))
    timer.start()
    ours.wait(["a", "b", "c"], timeout=20)
    timer.join()
    assert ours.keys() == ["a", "b", "c"]
    ours.wait([], timeout=0)


def test_add_counts_from_zero_and_returns_the_sum(stores):
    ours, theirs = stores
    assert [ours.add("n"), theirs.add("n", 5), ours.add("n", -10)] == [1, 6, -4]
    assert ours.get("n") == b"-4"
    theirs.set("n", b"41")
    assert ours.add("n") == 42


def test_add_to_what_is_no_number_is_refused_and_changes_nothing(stores):
    stores[0].set("text", b"hello")
    with pytest.raises(UsageError, match=r"'text' holds b'hello'(.|\n)*try: set it to digits first"):
        stores[1].add("text")
    assert stores[0].get("text") == b"hello"


def test_a_sum_that_no_64_bits_hold_is_refused_and_changes_nothing(stores):
    ours, theirs = stores
    most = (1 << 63) - 1
    assert ours.add("n", most) == most
    with pytest.raises(UsageError, match=r"64 bits(.|\n)*try: set it to b'0'"):
        theirs.add("n")
    assert theirs.add("n", -most) == 0


def test_concurrent_additions_are_all_counted(stores):
    def count(store: Store) -> None:
        for _ in range(50):
            store.add("n")

    threads = [threading.Thread(target=count, args=(store,)) for store in stores * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert stores[0].get("n") == b"200"


def test_compare_set_swaps_only_what_was_expected(stores):
    ours, theirs = stores
    assert ours.compare_set("lock", None, b"ours")
    assert not theirs.compare_set("lock", None, b"theirs")
    assert not theirs.compare_set("lock", b"nobody", b"theirs")
    assert theirs.compare_set("lock", b"ours", b"theirs")
    assert ours.get("lock") == b"theirs"
    assert not ours.compare_set("absent", b"", b"x")


def test_who_was_elected_binds_the_key_and_another_may_be_when_it_has_left(sessions):
    ours, theirs = sessions
    assert theirs.store.compare_set("leader", None, b"theirs", bind="session")
    assert not ours.store.compare_set("leader", None, b"ours", bind="session")
    theirs.leave()
    assert ours.store.compare_set("leader", None, b"ours", bind="session")


def test_a_key_that_is_taken_over_is_bound_to_who_did_so_or_stays_bound(sessions):
    ours, theirs = sessions
    for key in ("changed", "taken"):
        theirs.store.set(key, b"theirs", bind="session")
    assert ours.store.compare_set("changed", b"theirs", b"ours")
    assert ours.store.compare_set("taken", b"theirs", b"ours", bind="session")
    theirs.leave()
    assert ours.store.keys() == ["taken"]


def test_delete_says_whether_there_was_a_key(stores):
    ours, theirs = stores
    ours.set("key", b"1")
    assert theirs.delete("key")
    assert not ours.delete("key")
    with pytest.raises(StoreTimeoutError):
        ours.get("key", timeout=0)


def test_keys_are_sorted_and_chosen_by_prefix(stores):
    for key in ("b/2", "a", "b/10", "c"):
        stores[0].set(key, b"")
    assert stores[1].keys("b/") == ["b/10", "b/2"]
    assert stores[1].keys() == ["a", "b/10", "b/2", "c"]
    assert stores[1].keys("nothing") == []


def test_keys_that_no_single_answer_holds_are_all_there(stores):
    ours, theirs = stores
    names = [f"{number:03}{'x' * 497}" for number in range(300)]
    for name in names:
        ours.set(name, b"")
    theirs.set("~", b"")
    assert theirs.keys() == [*names, "~"]
    assert theirs.keys("1") == names[100:200]


def test_what_passes_a_limit_is_refused_and_changes_nothing(stores):
    with pytest.raises(MessageTooLargeError, match="value_bytes is 1048576"):
        stores[0].set("big", bytes((1 << 20) + 1))
    with pytest.raises(LimitExceededError, match="key_bytes is 512"):
        stores[0].set("k" * 513, b"")
    assert stores[0].keys() == []
    stores[0].set("k" * 512, bytes(1 << 20))
    assert stores[1].get("k" * 512) == bytes(1 << 20)


def test_the_values_of_a_compare_set_together_are_as_large_as_one_value(stores):
    most = bytes((1 << 20) - 1)
    stores[0].set("big", most)
    with pytest.raises(MessageTooLargeError, match=r"both values .* would be 1048577, the limit value_bytes is 1048576"):
        stores[0].compare_set("big", most, b"12")
    assert stores[0].compare_set("big", most, b"1")


def test_the_keys_of_a_wait_fit_into_one_request(stores):
    keys = [f"{number:0500}" for number in range(600)]
    with pytest.raises(MessageTooLargeError, match=r"the bytes of 600 keys would be .*, the limit frame_bytes is 262144"):
        stores[0].wait(keys, timeout=0)
    for each in (keys[:520], ["k"] * 65_520):  # nearly as many as fit
        with pytest.raises(StoreTimeoutError):
            stores[0].wait(each, timeout=0)


@pytest.mark.parametrize("key", ["", "two words", "tab\t", "ключ"])
def test_a_key_outside_the_alphabet_is_refused(stores, key):
    with pytest.raises(UsageError):
        stores[0].set(key, b"")


def test_bytes_of_any_kind_are_counted_by_the_byte_and_compared(stores):
    ours, theirs = stores
    with pytest.raises(MessageTooLargeError, match="value_bytes is 1048576"):
        ours.set("doubles", memoryview(array("d", bytes((1 << 20) + 8))))
    assert ours.compare_set("key", None, bytearray(b"1"))
    assert theirs.compare_set("key", memoryview(b"1"), bytearray(b"2"))
    assert ours.get("key") == b"2"
    with pytest.raises(UsageError):
        ours.compare_set("key", "2", b"3")
    assert theirs.keys() == ["key"]


@pytest.mark.parametrize("amount", [1.5, "1", None, 1 << 63])
def test_only_integers_of_64_bits_are_counted(stores, amount):
    stores[0].set("n", b"7")
    with pytest.raises(UsageError):
        stores[1].add("n", amount)
    assert stores[0].get("n") == b"7"


def test_the_keys_of_a_wait_may_be_any_iterable_or_a_single_key(stores):
    stores[0].set("here", b"")
    stores[1].wait("here", timeout=0)
    stores[1].wait(iter(["here"]), timeout=0)
    with pytest.raises(StoreTimeoutError) as caught:
        stores[1].wait(iter(["here", "not-here"]), timeout=0)
    assert caught.value.fields["missing"] == ["not-here"]


@pytest.mark.parametrize("key", [None, 1, b"key"])
def test_a_key_that_is_no_text_is_refused(stores, key):
    store = stores[0]
    calls = (lambda: store.get(key, timeout=0), lambda: store.set(key, b""), lambda: store.keys(key), lambda: store.wait([key]))
    for call in (*calls, lambda: store.wait(1)):
        with pytest.raises(UsageError):
            call()


def test_a_timeout_may_be_endless_but_is_a_number_from_0(stores):
    ours, theirs = stores
    theirs.set("key", b"1")
    ours.wait(["key"], timeout=float("inf"))
    assert ours.get("key", timeout=1e300) == b"1"
    for seconds in (-1, float("nan"), "1 s"):
        with pytest.raises(UsageError, match="timeout"):
            ours.get("key", timeout=seconds)


def test_only_bytes_are_stored_and_only_known_bindings_taken(stores):
    with pytest.raises(UsageError):
        stores[0].set("key", "text")
    with pytest.raises(UsageError, match=r"'forever' is not one of job, (.|\n)*try: leave it out"):
        stores[0].set("key", b"", bind="forever")
    with pytest.raises(UsageError):
        stores[0].compare_set("key", None, b"", bind="forever")
    assert stores[0].keys() == []
