"""Arrays of intervals behave like arrays of numpy, know what is undecided, and drop no end."""

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from otattn.lipschitz.arithmetic.intervals import Interval, Truth, is_interval, lift, lower, upper


def test_numbers_that_a_float_does_not_hold() -> None:
    big = lift(2**60 + 1)
    assert int(big.lo.item()) < 2**60 + 1 < int(big.hi.item())
    third = lift(np.longdouble(1) / 3)
    assert third.lo < np.longdouble(1) / 3 < third.hi or np.finfo(np.longdouble).eps == np.finfo(float).eps
    with pytest.raises(TypeError, match="real numbers are required"):
        lift([1j])
    with pytest.raises(ValueError, match="lo <= hi is required"):
        Interval.between([0.0, 2.0], [1.0, 1.0])


def test_truth() -> None:
    x = Interval.between([0.0, 1.0, 3.0], [0.5, 2.0, 4.0])
    below = x < np.array([1.0, 1.5, 2.0])
    assert below.sure.tolist() == [True, False, False]
    assert below.maybe.tolist() == [True, True, False]
    assert (~below).sure.tolist() == [False, False, True] == (x >= np.array([1.0, 1.5, 2.0])).sure.tolist()
    assert (below & np.array([True, False, True])).maybe.tolist() == [True, False, False]
    assert (np.array([True, False, True]) | below).sure.tolist() == [True, False, True]
    assert bool(below.any())
    assert (bool(below[1:].any().sure), bool(below[1:].any().maybe)) == (False, True)
    assert not bool(below.all())
    assert bool(below[0])
    assert not bool(below[2])
    assert (x > 0.0).sure.tolist() == [False, True, True] == np.less(0.0, x).sure.tolist()
    assert (x > 0.0).maybe.all()
    assert (x <= 0.5).sure.tolist() == [True, False, False]
    assert (x == 0.0).maybe.tolist() == [True, False, False] == [not v for v in (x != 0.0).sure]
    assert bool((lift(2.0) == 2.0) & ~(lift(2.0) != 2.0))
    for act in (
        lambda: bool(below[1]),
        lambda: bool(below),
        lambda: np.arange(3.0)[below],
        lambda: x[below],
        lambda: np.less(1.0, x[1]),
    ):
        with pytest.raises(ValueError, match="undecided"):
            bool(act())
    with pytest.raises(TypeError, match="a Truth takes"):
        below + 1
    assert np.arange(3.0)[x > 2.5].tolist() == [2.0]


def test_where_takes_the_hull_of_both_branches() -> None:
    x = Interval.between([0.0, 1.0, 3.0], [0.5, 2.0, 4.0])
    hull = np.where(x < 1.5, x, -1.0)
    assert (hull.lo.tolist(), hull.hi.tolist()) == ([0.0, -1.0, -1.0], [0.5, 2.0, -1.0])
    floats = np.where(x < 1.5, 10.0, 20.0)
    assert (floats.lo.tolist(), floats.hi.tolist()) == ([10.0, 10.0, 20.0], [10.0, 20.0, 20.0])
    plain = np.where(np.array([True, False, True]), 5.0, x)
    assert (plain.lo.tolist(), plain.hi.tolist()) == ([5.0, 1.0, 5.0], [5.0, 2.0, 5.0])
    x[x < 1.5] = 0.0
    assert (x.lo.tolist(), x.hi.tolist()) == ([0.0, 0.0, 3.0], [0.0, 2.0, 4.0])


def test_no_end_is_dropped_silently() -> None:
    x, a = Interval.between([0.0, 1.0], [1.0, 2.0]), np.ones(2)
    acts: list[Callable[[], Any]] = [
        lambda: float(x[0]),
        lambda: int(x[0]),
        lambda: np.asarray(x),
        lambda: np.array([x, x]),
    ]
    acts += [
        lambda: math.sqrt(x[0]),
        lambda: x.item(),
        lambda: a.dot(x),
        lambda: operator.iadd(a, x),
        lambda: np.floor(x),
    ]
    acts += [lambda: np.argmax(x), lambda: np.add(x, x, out=a), lambda: np.multiply(x, 1.0, where=[True, False])]
    for act in acts:
        with pytest.raises(TypeError):
            act()
    with pytest.raises((TypeError, ValueError)):
        a[0] = x[0]
    assert a.tolist() == [1.0, 1.0]
    for mixed in (a + x, a * x, a @ x, a / x, a <= x, np.maximum(a, x), np.clip(a, 0.0, x), a[0] - x):
        assert isinstance(mixed, Interval | Truth)
    assert is_interval(x)
    assert not is_interval(a)
    assert upper(a) is a
    assert lower(x) is x.lo
    assert upper(x) is x.hi


def test_assignment_leaves_other_arrays_alone() -> None:
    a = np.arange(3.0)
    x = lift(a)
    view = x[:2]
    x[0] = Interval.between(-1.0, 1.0)
    x[2] = 7.0
    view += 1
    assert a.tolist() == [0.0, 1.0, 2.0]
    assert (x.lo.tolist(), x.hi.tolist()) == ([-1.0, 1.0, 7.0], [1.0, 1.0, 7.0])
    assert np.all((view.lo <= [1.0, 2.0]) & (view.hi >= [1.0, 2.0]) & (view.hi < 2.1))
    filled = np.zeros_like(x)
    filled[1:] = x[1:]
    assert (is_interval(filled), filled.hi.tolist()) == (True, [0.0, 1.0, 7.0])


def test_placing_functions_follow_numpy() -> None:
    rng = np.random.default_rng(8)
    a = rng.normal(size=(3, 4))
    x = Interval.between(a, a + 1)
    acts: list[Callable[[Any], Any]] = [
        lambda v: np.concatenate([v, v], axis=1),
        lambda v: np.stack([v[0], v[1]]),
        lambda v: np.broadcast_to(v[0], (2, 4)),
        lambda v: np.expand_dims(v, 1).squeeze() if not is_interval(v) else np.squeeze(np.expand_dims(v, 1)),
        lambda v: np.take(v, [0, 2], axis=0),
        lambda v: v.T.reshape(2, 6),
        lambda v: np.ravel(v)[::-1].copy(),
        lambda v: np.transpose(v)[..., None],
        lambda v: np.max(v, axis=1, keepdims=True),
        lambda v: v.min(axis=0, initial=0.0),
        lambda v: np.sort(v, axis=0),
        lambda v: np.clip(v, -0.5, 0.5),
        lambda v: np.maximum.accumulate(v, axis=1),
    ]
    for act in acts:
        assert np.array_equal(act(x).lo, act(a))
        assert np.array_equal(act(x).hi, act(a + 1))
    assert (x.shape, x.ndim, x.size, len(x), np.shape(x)) == ((3, 4), 2, 12, 3, (3, 4))
    assert [row.shape for row in x] == [(4,)] * 3
    difference = np.diff(lift(a), axis=0)
    assert np.all((difference.lo <= np.diff(a, axis=0)) & (np.diff(a, axis=0) <= difference.hi))
    assert np.all(np.add.outer(x, a).lo <= np.add.outer(a, a))
    assert np.isfinite(1 / x).tolist() == ((a > 0) | (a + 1 < 0)).tolist()
    assert np.full_like(x, 2.0).hi.tolist() == np.full_like(a, 2.0).tolist()
    assert "\n" not in repr(x)
