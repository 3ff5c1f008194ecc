"""Batch normalisation over the batches of all ranks, as functions of arrays. Batches may differ in size, and may be empty.

Idea. Each rank contributes, for every channel, its number of values, their mean, and the sum of squared deviations from it.
Every rank gathers these and combines them in rank order, so the statistics have the same bits on all ranks, without the
cancellation of a plain sum of squares.

Source. Ioffe and Szegedy, "Batch Normalization", 2015; the combination of statistics: Chan, Golub and LeVeque, "Updating
Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.

Cost, for c channels on p ranks: one all_gather of 1 + 2 c float64 forward, one all_reduce of 2 c float64 backward.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Generic, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from ferrorpc.arrays.base import View
from ferrorpc.arrays.kinds import NUMPY, view
from ferrorpc.ddp.bucket_memory import Array
from ferrorpc.ddp.type_variables import TypeVar
from ferrorpc.errors import TensorMismatchError, UsageError
from ferrorpc.group import ProcessGroup, group_given
from ferrorpc.operations.type_hints import A, ReadThroughDLPack

Y = TypeVar("Y", default=Any)


class Moments(NamedTuple):
    """Statistics of each channel over all ranks, the same on every rank.

    Attributes:
        mean: float64 of shape (channels,).
        variance: the biased one, which normalisation uses; float64 of shape (channels,).
        values: how many values a channel has on all ranks together.
    """

    mean: Array
    variance: Array
    values: int


class Normalised(NamedTuple, Generic[Y]):
    """The result of `batch_norm`, and what its gradient needs.

    Attributes:
        y: (x - mean) / sqrt(variance + epsilon); of x's kind, dtype and shape.
        moments: for running statistics.
    """

    y: Y
    moments: Moments
    scaled: Array
    """y in float64, channels first. For the gradient."""
    deviation: Array
    axis: int


@overload
def batch_norm(x: A, group: ProcessGroup, *, axis: int = ..., epsilon: float = ...) -> Normalised[A]: ...
@overload
def batch_norm(
    x: ReadThroughDLPack, group: ProcessGroup, *, axis: int = ..., epsilon: float = ...
) -> Normalised[NDArray[Any]]: ...
@np.errstate(all="ignore")
def batch_norm(x: Any, group: ProcessGroup, *, axis: int = 1, epsilon: float = 1e-5) -> Normalised[Any]:
    """Normalises each channel by its statistics over the batches of all ranks. Collective.

    Args:
        x: this rank's batch: an array of real floats whose shape may differ from other ranks' except along `axis`.
        group: every rank calls it at the same point of its program.
        axis: where the channels are.
        epsilon: added to the variance, so that a channel of equal values does not cause a division by zero.

    Raises:
        UsageError: no rank has a value, or epsilon is no number of 0 or more.
        TensorMismatchError: x is not of real floats, or has no such axis; ranks have different numbers of channels.
    """
    group_given(group)
    if not isinstance(epsilon, Real) or not 0 <= epsilon < math.inf:
        raise UsageError(f"epsilon={epsilon!r} is no number of 0 or more", hint="leave it out for 1e-5")
    source = _checked(x, axis)
    values = _channels_first(source, axis)
    moments = _moments(values, group)
    deviation = np.sqrt(moments.variance + epsilon)
    scaled = (values - moments.mean[:, None]) / deviation[:, None]
    y = _wrapped(scaled, source, axis)
    return Normalised(y, moments, scaled, deviation, axis)


@overload
def batch_norm_gradient(grad_y: A, forward: Normalised[Any], group: ProcessGroup) -> A: ...
@overload
def batch_norm_gradient(grad_y: ReadThroughDLPack, forward: Normalised[Any], group: ProcessGroup) -> NDArray[Any]: ...
@np.errstate(all="ignore")
def batch_norm_gradient(grad_y: Any, forward: Normalised[Any], group: ProcessGroup) -> Any:
    """The gradient of the sum of all ranks' losses with respect to x, from that with respect to `forward.y`. Collective.

    The losses are added as they are; weights with which gradients are averaged later come after that sum. So where batches
    differ in size, scale each rank's loss by the size of its batch, times `group.size`, over that of all, and give no weight.

    Args:
        grad_y: an array like `forward.y`.
        forward: the result of `batch_norm` on this rank.
        group: the same as there.

    Raises:
        UsageError: `forward` is not a result of `batch_norm`.
        TensorMismatchError: dtype or shape of grad_y are not those of y.
    """
    group_given(group)
    if not isinstance(forward, Normalised):
        raise UsageError(f"forward is a {type(forward).__name__}", hint="pass what batch_norm() returned, not its y alone")
    given, made = _checked(grad_y, forward.axis), view(forward.y)
    if given.spec != made.spec:
        raise TensorMismatchError(f"grad_y is {given.spec}, but y was {made.spec}", hint="give a gradient like forward.y")
    gradient = _channels_first(given, forward.axis)
    sums = np.stack([gradient.sum(axis=1), (gradient * forward.scaled).sum(axis=1)])
    means = group.all_reduce(sums, out=sums) / forward.moments.values
    centred = gradient - means[0][:, None] - forward.scaled * means[1][:, None]
    return _wrapped(centred / forward.deviation[:, None], given, forward.axis)


def _moments(values: Array, group: ProcessGroup) -> Moments:
    """The statistics of float64 values of shape (channels, values of this rank)."""
    own = values.shape[1]
    mean = values.mean(axis=1) if own else np.zeros(len(values))
    squares = np.square(values - mean[:, None]).sum(axis=1)
    everyones = group.all_gather(np.concatenate([[float(own)], mean, squares]))
    if any(each.shape != everyones[0].shape for each in everyones):
        channels = ", ".join(str(each.size // 2) for each in everyones)
        raise TensorMismatchError(f"ranks have different numbers of channels: {channels}", hint="is `axis` right?")
    count, mean, squares = 0.0, np.zeros_like(mean), np.zeros_like(squares)
    for each in everyones:
        if each[0] == 0:
            continue
        more, (their_mean, their_squares) = each[0], np.split(each[1:], 2)
        distance = their_mean - mean
        squares = squares + their_squares + distance * distance * (count * more / (count + more))
        mean = mean + distance * (more / (count + more))
        count += more
    if count == 0:
        raise UsageError("no rank has a value to normalise", hint="at least one rank needs a batch")
    return Moments(mean, squares / count, int(count))


def _checked(x: Any, axis: Any) -> View:
    source = view(x)
    if not isinstance(axis, int | np.integer):
        raise UsageError(f"axis={axis!r} is no whole number", hint="pass the axis where channels are: 1, or -1 for the last")
    if not source.spec.dtype.is_float or not -len(source.spec.shape) <= axis < len(source.spec.shape):
        raise TensorMismatchError(
            f"{source.spec} has no channels of real floats along axis {axis}", hint="pass floats, and axis= where channels are"
        )
    return source


def _channels_first(source: View, axis: int) -> Array:
    """float64 of shape (channels, the rest)."""
    typed = np.moveaxis(NUMPY.typed(source.data, source.spec), axis, 0)
    return typed.astype(np.float64).reshape(len(typed), int(np.prod(typed.shape[1:])))


def _wrapped(values: Array, like: View, axis: int) -> Any:
    """The reverse of `_channels_first`, in the kind, dtype and shape of `like`."""
    spec = like.spec
    moved = (spec.shape[axis], *(size for place, size in enumerate(spec.shape) if place != axis % len(spec.shape)))
    result = NUMPY.empty(spec.shape, spec.dtype)
    result[...] = np.moveaxis(values.reshape(moved), 0, axis)
    return like.kind.wrap(result.view(spec.dtype.storage), spec)
