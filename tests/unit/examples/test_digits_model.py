"""The example network: its gradients against finite differences, and the methods that DistributedDataParallel needs."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.fixture(scope="module")
def model_file():
    spec = importlib.util.spec_from_file_location("digits_model", EXAMPLES / "digits_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_model"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["digits_model"]


@pytest.fixture
def net(model_file):
    made = model_file.DigitsNet((5, 4, 3), seed=3, dropout=0.0)
    for parameter in made.parameters():
        parameter.data = parameter.data.astype(np.float64)
    return made


def data(rows=7):
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 5)), random.integers(0, 3, rows)


def test_the_gradients_are_those_of_finite_differences(model_file, net):
    x, labels = data()
    _, grad = model_file.softmax_cross_entropy(net.forward(x), labels)
    net.backward(grad)
    step = 1e-6
    for name, parameter in net.named_parameters():
        for index in np.ndindex(parameter.data.shape):
            losses = []
            for shift in (step, -step):
                parameter.data[index] += shift
                losses.append(model_file.softmax_cross_entropy(net.forward(x), labels)[0])
                parameter.data[index] -= shift
            slope = (losses[0] - losses[1]) / (2 * step)
            assert parameter.grad[index] == pytest.approx(slope, abs=1e-7), f"{name}{list(index)}"


def test_gradients_add_up_until_the_step(model_file, net):
    x, labels = data()
    for _ in range(2):
        net.backward(model_file.softmax_cross_entropy(net.forward(x), labels)[1])
    twice = [parameter.grad.copy() for parameter in net.parameters()]
    for parameter in net.parameters():
        parameter.grad = None
    net.backward(model_file.softmax_cross_entropy(net.forward(x), labels)[1])
    for parameter, double in zip(net.parameters(), twice, strict=True):
        np.testing.assert_allclose(double, 2 * parameter.grad)


def test_names_and_parameters_are_in_one_order(net):
    named = dict(net.named_parameters())
    assert list(named) == ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]
    assert list(named.values()) == list(net.parameters())


def test_the_loss_of_equal_logits_is_the_log_of_the_classes(model_file):
    loss, grad = model_file.softmax_cross_entropy(np.zeros((4, 10)), np.arange(4))
    assert loss == pytest.approx(np.log(10))
    assert grad.sum() == pytest.approx(0)
    assert grad[0, 0] == pytest.approx((0.1 - 1) / 4)


def test_dropout_acts_in_training_only_and_keeps_the_expectation(model_file):
    net = model_file.DigitsNet((5, 2000, 1), seed=0, dropout=0.5)
    x = data()[0].astype(np.float32)
    net.layers[-1].weight.data[...] = 1
    assert not np.array_equal(net.forward(x), net.forward(x))
    net.eval()
    assert np.array_equal(net.forward(x), net.forward(x))
    net.train()
    mean = np.mean([net.forward(x) for _ in range(200)], axis=0)
    np.testing.assert_allclose(mean, net.eval().forward(x), atol=8)


def test_momentum_follows_its_formula(model_file):
    import ferrorpc

    parameter = ferrorpc.Parameter(np.array([1.0, 2.0], np.float32))
    optimizer = model_file.Momentum(iter([parameter]), rate=0.5, momentum=0.5)
    parameter.grad = np.array([1.0, 0.0], np.float32)
    optimizer.step()
    np.testing.assert_array_equal(parameter.data, [0.5, 2.0])
    assert parameter.grad is None
    parameter.grad = np.array([1.0, 2.0], np.float32)
    optimizer.step()
    np.testing.assert_array_equal(parameter.data, [0.5 - 0.5 * 1.5, 1.0])
