"""A backend's own send and recv, called without a group around it: what goes in comes out, and what cannot is refused."""

from __future__ import annotations

import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ferrorpc import Backend, InvalidRankError, SelfSendError, SimulatedBackend, TensorMismatchError, UsageError
from ferrorpc.testing.reference import every_dtype, values

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def pair() -> list[Backend]:
    return SimulatedBackend.create_group(2)


@pytest.mark.parametrize("dtype", every_dtype(), ids=lambda dtype: dtype.label)
def test_every_dtype_arrives_as_it_was_sent(pair, dtype):
    sent = values(dtype, (2, 3), 0)
    pair[0].send(sent, 1)
    found = pair[1].recv(0)
    assert (found.dtype, found.tolist()) == (sent.dtype, sent.tolist())
    assert found.flags.writeable
    assert (found if found.base is None else found.base).flags.owndata


def test_out_may_be_strided_and_is_what_comes_back(pair):
    memory = np.zeros(4, BFLOAT16)
    pair[0].send(np.ones(2, BFLOAT16), 1, tag=3)
    out = memory[::2]
    assert pair[1].recv(0, tag=3, out=out) is out
    assert memory.tolist() == [1, 0, 1, 0]


def test_what_does_not_fit_out_stays_for_the_next_recv(pair):
    pair[0].send(np.arange(3.0), 1)
    with pytest.raises(TensorMismatchError):
        pair[1].recv(0, out=np.zeros(4))
    assert pair[1].recv(0, timeout=1).tolist() == [0, 1, 2]


def test_numbers_and_tensors_are_arrays_and_lists_are_none(pair):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for sent in (3, np.float32(3), torch.full((), 3, dtype=torch.bfloat16)):
        pair[0].send(sent, 1)
        assert pair[1].recv(0).tolist() == 3
    for wrong in ([1, 2], "text", None):
        with pytest.raises(UsageError, match="is no array"):
            pair[0].send(wrong, 1)
    with pytest.raises(UsageError, match="list"):
        pair[1].recv(0, out=[0, 0])


WRONG: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "a stranger": ({"dst": 2}, InvalidRankError),
    "a name": ({"dst": "1"}, InvalidRankError),
    "itself": ({"dst": 0}, SelfSendError),
    "a negative tag": ({"dst": 1, "tag": -1}, UsageError),
    "a tag that is text": ({"dst": 1, "tag": "x"}, UsageError),
    "a tag beyond the wire's": ({"dst": 1, "tag": 1 << 63}, UsageError),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_address_is_refused(pair, case):
    address, error = WRONG[case]
    with pytest.raises(error):
        pair[0].send(np.ones(1), **address)
    with pytest.raises(error):
        pair[0].recv(**{"src" if key == "dst" else key: value for key, value in address.items()}, timeout=0)


@pytest.mark.parametrize("seconds", [-1, "soon", float("nan"), True])
def test_a_timeout_that_is_no_number_of_seconds_is_refused_and_breaks_nothing(pair, seconds):
    for call in (lambda: pair[0].recv(1, timeout=seconds), lambda: pair[0].barrier(seconds)):
        with pytest.raises(UsageError, match="timeout="):
            call()
    with pytest.raises(UsageError, match="timeout="):
        SimulatedBackend.create_group(2, timeout=seconds)
    other = threading.Thread(target=pair[1].barrier, daemon=True)
    other.start()
    pair[0].barrier(20.0)
    other.join(20.0)
