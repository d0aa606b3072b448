"""Attention maps that are a function of the caller."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from otattn import _validate as check
from otattn._derivatives import Derivative, Library, checked, library_of
from otattn._derivatives.numerical import central_differences
from otattn._derivatives.tokens import Atoms, PlacedTokens, Tokens, multiplicities
from otattn._linalg import Array
from otattn.attention.base import AttentionMap, Measure
from otattn.attention.jacobian import JacobianOperator
from otattn.errors import NoJacobianError
from otattn.measures import SpaceTimeMeasure

__all__ = ["FunctionAttention"]

SAME = 1e-6
"""Relative: how far values of the same tokens in another order, each twice, may lie from one another."""


@dataclass(frozen=True, eq=False, init=False)
class FunctionAttention(AttentionMap):
    r"""A map ``x -> Gamma_mu(x)`` given by a function, with its derivative.

    .. math:: F(\mu) = (\Gamma_\mu)_\# \mu, \qquad \Gamma_\mu(x_i) = \mathrm{function}(x, \mu)_i
              \quad\text{or}\quad \Gamma_\mu(x_i) = \mathrm{function}(X)_i, \; \mu = \tfrac1n \sum_i \delta_{x_i}

    Which of the two is meant is told by the number of parameters of ``function`` that have no default. Distances, ratios,
    studies, local constants, lower bounds, flows and gradient-flow checks work on it. No theorem covers it: there is no
    proven upper bound, ``certified_lower`` of a ratio is 0 and its ``resolution`` "unbounded", since nothing bounds the
    rounding of its values.

    Parameters
    ----------
    function : callable
        ``(x, mu) -> values (m, e)``: row by row at ``x (m, d)``, for a measure ``mu`` (``points``, ``weights``, ``mean()``,
        and ``times`` where it has them). Or ``(X) -> Y``: tokens ``(n, d)`` to tokens ``(n, e)``. It must not change its
        arguments. It may be written in numpy, torch (also a ``torch.nn.Module`` that takes one array ``(n, d)``) or jax.
    dim : int, optional
        Dimension d of the tokens; any by default.
    value_dim : int, optional
        Dimension e of the values; that of the tokens by default.
    jvp, vjp : callables, optional
        The derivative along a direction and its adjoint. For ``(X)``: ``jvp(X, V)`` and ``vjp(X, G)``. For ``(x, mu)``:
        ``jvp(x, mu, dx, dy)``, where the rows move by ``dx (m, d)`` and the atoms by ``dy (n, d)``, and ``vjp(x, mu, g)``,
        which gives the pair of both gradients. What is not given is found by the other. They are compared with differences.
    causal : bool
        The map depends on the order of the tokens, as a causal mask or positions make it. It then acts on space-time measures
        (:class:`MaskedAttention`); an array is the sequence of its rows. A function ``(x, mu)`` may take
        ``(x, mu, times)``, the times of the rows, and is otherwise known at the atoms' own times only.

    Raises
    ------
    TypeError
        ``function`` cannot be called, or its parameters do not tell what it takes.
    ValueError
        In calls: values that are not finite, or not one row of dimension e for each row of x; a function of tokens that is
        no function of their measure (it depends on their order or on their number); derivatives given that are wrong.

    Notes
    -----
    Derivatives that are not given come from torch or jax where the function returns their arrays, else from the
    complex step where the function is analytic (this is checked), else from central differences.
    ``attention.jacobian(mu)`` has the ``method``, and an estimate of its relative ``error`` (0 where only float64 rounds).

    A function of tokens is known at the tokens only, not at other points. Its ``D_x Gamma_mu`` comes from its tokens taken
    twice, one copy of each moved by v and the other by -v: to first order the measure stays. A causal function of tokens has no
    such derivative: atoms of a sequence do not split, and a local constant is that of moved tokens.

    Examples
    --------
    >>> centred = FunctionAttention(lambda x, mu: x - mu.mean())
    >>> centred.pushforward([[1.0], [3.0]]).points.ravel()
    array([-1.,  1.])
    >>> import numpy as np
    >>> def attend(X):
    ...     P = np.exp(X @ X.T)
    ...     return P / P.sum(axis=1, keepdims=True) @ X
    >>> attention = FunctionAttention(attend, 2)
    >>> J = attention.jacobian([[1.0, 0.0], [0.0, 1.0]])
    >>> J.method, J.error
    ('complex step', 0.0)
    """

    function: Callable[..., Any]
    dim: int | None
    value_dim: int | None
    jvp: Callable[..., Any] | None
    vjp: Callable[..., Any] | None
    ordered: bool
    """As ``causal``."""

    def __init__(
        self,
        function: Callable[..., Any],
        dim: int | None = None,
        *,
        value_dim: int | None = None,
        jvp: Callable[..., Any] | None = None,
        vjp: Callable[..., Any] | None = None,
        causal: bool = False,
    ) -> None:
        if not callable(function) or isinstance(function, (type, AttentionMap)):
            raise TypeError(
                "function must be a callable (x, mu) -> values or (X) -> values, received "
                f"{function.__name__ if isinstance(function, type) else type(function).__name__}; "
                "an attention map is used as it is."
            )
        for name, product in (("jvp", jvp), ("vjp", vjp)):
            if product is not None and not callable(product):
                raise TypeError(f"{name} must be a callable, received {type(product).__name__}; leave it out.")
        values = {
            "function": function,
            "dim": None if dim is None else check.count(dim, "dim"),
            "value_dim": None if value_dim is None else check.count(value_dim, "value_dim"),
            "jvp": jvp,
            "vjp": vjp,
            "ordered": bool(causal),
            "_places": _places(function, bool(causal)),
            "_library": None,
            "_agrees": bool(causal),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def in_dim(self) -> int | None:
        return self.dim

    @property
    def out_dim(self) -> int | None:
        return self.dim if self.value_dim is None else self.value_dim

    @property
    def causal(self) -> bool:
        return self.ordered

    @property
    def splits(self) -> bool:
        return not (self.ordered and self._places == 1)  # type: ignore[attr-defined]

    @property
    def everywhere(self) -> bool:
        return self._places == (3 if self.ordered else 2)  # type: ignore[attr-defined]

    # the function, in its library

    def _run(self, x: Any, mu: Any, times: Any) -> Any:
        return self.function(*(x, mu, times)[: self._places])  # type: ignore[attr-defined]

    def _measure(self, library: Library, mu: Measure, y: Any) -> Any:
        """The measure with atoms y, as the function takes it."""
        if library.name == "numpy" and y.dtype == np.float64:
            return mu._with_points(y)
        times = getattr(mu, "times", None)
        return Atoms(y, library.constant(mu.weights), None if times is None else library.constant(times))

    def _found_library(self, x: Array, mu: Measure, times: Array | None) -> Library:
        """What the function is written in, found at its first call."""
        known: Library | None = self._library  # type: ignore[attr-defined]
        if known is None:

            def call(library: Library) -> Any:
                points, clock = library.constant(mu.points), None if times is None else library.constant(times)
                return self._run(library.constant(x), self._measure(library, mu, points), clock)

            known = library_of(self.function, call)
            object.__setattr__(self, "_library", known)
        return known

    def _values(self, x: Array, mu: Measure, times: Array | None) -> Array:
        """The function at x, its values checked."""
        rows = check.frozen(x)
        library = self._found_library(rows, mu, times)
        clock = None if times is None else library.constant(times)
        own = mu if library.name == "numpy" else self._measure(library, mu, library.constant(mu.points))
        raw = library.evaluate(lambda z: self._run(z, own, clock), rows)
        name = "function(X)" if self._places == 1 else "function(x, mu)"  # type: ignore[attr-defined]
        values = check.points(raw, name, dim=self.out_dim or x.shape[1])
        if len(values) != len(x):
            raise ValueError(
                f"function must return one row of values for each row of x, received {len(values)} for {len(x)}."
            )
        return values

    def _apply(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        if not self.everywhere:
            self._own(x, mu, times)
        if self._places != 1:  # type: ignore[attr-defined]
            return self._values(x, mu, times)
        tokens = self._tokens_of(mu)
        return self._values(mu.points[tokens.atoms], mu, None)[tokens.first]

    def _own(self, x: Array, mu: Measure, times: Array | None) -> None:
        """Refuse rows that are not the atoms."""
        same = x is mu.points or np.array_equal(x, mu.points)
        if not same or (times is not None and not np.array_equal(times, mu.times)):  # type: ignore[union-attr]
            what = "(x, mu, times)" if self.ordered else "(x, mu)"
            raise ValueError(
                f"x must be the atoms of mu for a function of tokens, received {len(x)} other rows; write the "
                f"function as {what} -> values to have it at other points."
            )

    # a function of tokens: which tokens a measure is

    def _tokens_of(self, mu: Measure) -> Tokens:
        if self.ordered:
            assert isinstance(mu, SpaceTimeMeasure)
            if not (mu.weights == mu.weights[0]).all() or len(np.unique(mu.times)) < mu.n:
                raise ValueError(
                    "mu must be a sequence (distinct times, equal weights) for a causal function of tokens, received "
                    f"{mu!r}; write the function as (x, mu, times) -> values."
                )
            order = np.argsort(mu.times, kind="stable")
            return Tokens(order, np.argsort(order, kind="stable"))
        counts = multiplicities(mu.weights)
        tokens = Tokens(np.repeat(np.arange(mu.n), counts), np.cumsum(counts) - counts)
        if not self._agrees:  # type: ignore[attr-defined]
            self._check_measure(mu, mu.points[tokens.atoms])
            object.__setattr__(self, "_agrees", True)
        return tokens

    def _check_measure(self, mu: Measure, X: Array) -> None:
        """Refuse a function whose values depend on more than the measure of its tokens."""
        once, twice = self._values(X, mu, None), self._values(np.concatenate([X[::-1], X]), mu, None)
        gap = float(np.abs(twice - np.concatenate([once[::-1], once])).max())
        tol = max(SAME, 100.0 * check.resolution(np.empty(0, self._library.dtype)))  # type: ignore[attr-defined]
        if not gap <= tol * max(float(np.abs(once).max()), 1e-300):
            raise ValueError(
                "function must depend on its tokens through their measure, received one whose values change by "
                f"{gap:.3g} when the same tokens come in another order, each twice; give causal=True for a map of sequences, "
                "and divide sums over tokens by their number."
            )

    # derivatives

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        y = mu.points
        found = self._derivative(mu, y, times, self._at_atoms_of(mu), moves=True)
        e = self.out_dim or mu.dim
        return JacobianOperator(mu.n, mu.dim, e, jvp=found.jvp, vjp=found.vjp, method=found.method, error=found.error)

    def _field(self, x: Array, mu: Measure, times: Array | None, block_size: int | None) -> Array:
        if not self.splits:
            raise NoJacobianError(
                "field_jacobian needs a function (x, mu, times) -> values, received a causal function of tokens, whose atoms "
                "do not split; local constants and lower bounds are those of moved tokens."
            )
        if not self.everywhere:
            self._own(x, mu, times)
        found = self._derivative(mu, x, times, self._at_atoms_of(mu, split=True), moves=False)
        columns = [found.jvp(np.broadcast_to(row, x.shape)) for row in np.eye(x.shape[1])]
        return np.stack(columns, axis=2)

    def _at_atoms_of(self, mu: Measure, *, split: bool = False) -> PlacedTokens | None:
        """For functions of tokens: how tokens follow the atoms."""
        if self._places != 1:  # type: ignore[attr-defined]
            return None
        tokens = self._tokens_of(mu)
        atoms = np.concatenate([tokens.atoms, tokens.atoms]) if split else tokens.atoms
        signs = np.ones((len(atoms), 1))
        signs[len(tokens.atoms) :] = -1.0
        return PlacedTokens(mu.points, atoms, tokens.first, signs)

    def _derivative(
        self, mu: Measure, x: Array, times: Array | None, placed: PlacedTokens | None, *, moves: bool
    ) -> Derivative:
        """Of the values in the rows x; the atoms move with them, or stay."""
        library = self._found_library(x, mu, times)
        clock = None if times is None else library.constant(times)
        still = None if moves else self._measure(library, mu, library.constant(mu.points))

        def values(z: Any) -> Any:
            if placed is not None:
                return self.function(placed.tokens(library, z))[placed.first]
            return self._run(z, self._measure(library, mu, z) if still is None else still, clock)

        if self.jvp is None and self.vjp is None:
            return library.derivative(values, x)
        out = (len(x), self.out_dim or mu.dim)
        args = (x, mu, times)[: self._places]  # type: ignore[attr-defined]
        given = _given(self, args, placed, moves, (len(x), mu.dim), out)
        return checked(given, central_differences(lambda z: library.evaluate(values, z), x)[0])

    def __repr__(self) -> str:
        name = getattr(self.function, "__qualname__", type(self.function).__name__)
        own = {"dim": self.dim, "value_dim": self.value_dim, "causal": self.ordered or None}
        return f"FunctionAttention({', '.join([name, *(f'{k}={v}' for k, v in own.items() if v is not None)])})"


def _given(
    attention: FunctionAttention,
    args: tuple[Any, ...],
    placed: PlacedTokens | None,
    moves: bool,
    shape: tuple[int, int],
    out: tuple[int, int],
) -> Derivative:
    """The caller's own derivative as one in the rows."""
    jvp, vjp = attention.jvp, attention.vjp
    zero = None if placed is not None else np.zeros_like(args[1].points)
    X = None if placed is None else check.frozen(placed.tokens(Library(), placed.points))

    def columns(v: Array) -> Array:
        assert jvp is not None
        if placed is not None:
            return check.points(jvp(X, placed.gather(v)), "jvp(X, V)", dim=out[1])[placed.first]
        return check.points(jvp(*args, v, v if moves else zero), "jvp(x, mu, dx, dy)", dim=out[1])

    def rows(g: Array) -> Array:
        assert vjp is not None
        if placed is not None:
            return placed.collect(check.points(vjp(X, placed.scatter(g, out[1])), "vjp(X, G)", dim=shape[1]))
        dx, dy = vjp(*args, g)
        dx = check.points(dx, "the first of vjp(x, mu, g)", dim=shape[1])
        return dx + check.points(dy, "the second of vjp(x, mu, g)", dim=shape[1]) if moves else dx

    return Derivative(shape, out, None if jvp is None else columns, None if vjp is None else rows, "given")


def _places(function: Callable[..., Any], causal: bool) -> int:
    """How many arrays the function takes: (X), (x, mu), or (x, mu, times) for a causal one."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        parameters = None
    found = 0
    for p in parameters or ():
        if p.default is p.empty and p.kind is not p.VAR_KEYWORD:
            found += 9 if p.kind in (p.VAR_POSITIONAL, p.KEYWORD_ONLY) else 1
    if parameters is None or found not in ((1, 2, 3) if causal else (1, 2)):
        allowed = "(X), (x, mu) or (x, mu, times)" if causal else "(X) or (x, mu)"
        raise TypeError(
            f"function must take {allowed}, other parameters having defaults, received "
            f"{getattr(function, '__name__', type(function).__name__)} with other parameters; wrap it: lambda X: function(X, ...)."
        )
    return found
