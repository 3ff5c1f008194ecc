"""torch tensors, where torch is installed."""

from __future__ import annotations

import numpy as np
import pytest

from ferrorpc.arrays.kinds import kind_of, view, view_out
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.types import DType, TensorSpec

torch = pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("dtype", [d for d in DType if hasattr(torch, d.label)], ids=lambda d: d.label)
def test_host_tensors_are_borrowed_and_come_back(dtype):
    x = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(getattr(torch, dtype.label))
    got = view(x)
    assert got.spec == TensorSpec(dtype, (2, 3))
    assert got.borrowed
    assert got.data.dtype == dtype.storage
    assert got.data.ctypes.data == x.data_ptr()
    back = got.kind.wrap(got.data.copy(), got.spec)
    assert back.dtype == x.dtype
    assert torch.equal(back, x)
    assert got.kind.empty((4,), dtype).dtype == x.dtype


def test_strided_and_empty_and_scalar_tensors_are_read():
    x = torch.arange(12.0).reshape(3, 4)
    for y in (x.t(), x[:, ::2], x[1, 1], x[:0]):
        got = view(y)
        assert got.data.shape == tuple(y.shape)
        assert np.array_equal(got.data, y.numpy())


def test_a_tensor_with_a_gradient_is_refused_with_the_way_out():
    x = torch.zeros(3, requires_grad=True)
    with pytest.raises(UsageError, match=r"pass x.detach\(\)"):
        view(x)
    with pytest.raises(UsageError, match=r"pass x.detach\(\)"):
        view_out(x, TensorSpec(DType.FLOAT32, (3,)))
    assert view(x.detach()).spec.shape == (3,)


def test_only_a_plain_tensor_on_the_host_shares_its_memory_at_once():
    x = torch.ones(3)
    kind = kind_of(x)
    shared = kind.memory(x)
    shared[0] = 7
    assert x.tolist() == [7, 1, 1]
    others = [torch.nn.Parameter(x), x.clone().requires_grad_(), x.bfloat16(), x.to_sparse(), (x * 1j).conj(), x.to("meta")]
    for other in (*others, np.ones(3), None):
        assert kind.memory(other) is None
    torch.func.functionalize(lambda inner: [inner.clone()] if kind.memory(inner) is None else pytest.fail("it has none"))(x)


def test_a_tensor_without_elements_is_neither_read_nor_written():
    nothing = torch.ones(3, device="meta")
    for call in (lambda: view(nothing), lambda: view_out(nothing, TensorSpec(DType.FLOAT32, (3,)))):
        with pytest.raises(UsageError, match="meta"):
            call()


def test_sparse_tensors_and_other_dtypes_are_refused():
    with pytest.raises(UsageError, match="to_dense"):
        view(torch.eye(2).to_sparse())
    with pytest.raises(TensorMismatchError, match="complex128"):
        view(torch.zeros(2, dtype=torch.float8_e4m3fn))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=layout)
    with pytest.raises(UsageError, match=r"is nested: its rows differ in length\ntry: send x.values\(\)"):
        view(nested)


def test_tensors_that_stand_for_others_are_refused():
    with pytest.raises(UsageError, match=r"not accessible.*\n.*vmap"):
        torch.vmap(lambda x: view(x).spec)(torch.ones(2, 3))
    with pytest.raises(UsageError, match="no memory of its own"):
        torch.func.functionalize(lambda x: view(x).spec)(torch.ones(2, 3))
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(2, dtype=torch.bfloat16)
    for call in (lambda: view(x), lambda: view_out(x, TensorSpec(DType.BFLOAT16, (2,)))):
        with pytest.raises(UsageError, match="FakeTensor"):
            call()


def test_conjugated_views_are_resolved():
    x = torch.tensor([1 + 2j])
    assert view(x.conj()).data.tolist() == [1 - 2j]


def test_out_may_be_strided_and_is_the_result():
    base = torch.zeros(3, 4, dtype=torch.bfloat16)
    out = base[:, ::2]
    place = view_out(out, TensorSpec(DType.BFLOAT16, (3, 2)))
    place.data[...] = 0x3F80
    assert place.commit() is out
    assert base.float().tolist() == [[1, 0, 1, 0]] * 3


def test_out_that_does_not_fit_is_refused():
    with pytest.raises(TensorMismatchError):
        view_out(torch.zeros(3), TensorSpec(DType.FLOAT64, (3,)))
    with pytest.raises(TensorMismatchError, match="share memory"):
        view_out(torch.zeros(1).expand(3), TensorSpec(DType.FLOAT32, (3,)))


@pytest.mark.parametrize("lazy", [lambda x: x.conj(), lambda x: x.conj().imag], ids=["conjugated", "negated"])
def test_out_that_is_a_lazy_view_is_refused_with_the_way_out(lazy):
    out = lazy(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TensorMismatchError, match=r"pass x.resolve_conj\(\).resolve_neg\(\)"):
        view_out(out, view(out).spec)


def test_in_place_is_seen_and_partial_overlap_refused():
    base = torch.zeros(10)
    x = view(base[:6])
    assert view_out(base[:6], x.spec).is_in_place(x)
    with pytest.raises(UsageError, match="in part"):
        view_out(base[2:8], x.spec).is_in_place(x)


def test_the_kind_is_that_of_the_device():
    assert kind_of(torch.zeros(1)) is kind_of(torch.ones(2))
