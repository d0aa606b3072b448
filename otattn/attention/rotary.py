"""Softmax attention with rotary positions: the logits depend on how far apart two tokens are."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from otattn import _validate as check
from otattn.attention.base import Measure
from otattn.attention.jacobian import JacobianOperator, finite
from otattn.attention.kernels import NormalisedKernel, Projections
from otattn.attention.single_head import NormalisedJacobian, SingleHead, _apply_softmax_derivative
from otattn.measures import SpaceTimeMeasure

__all__ = ["RotaryAttention"]

Array = NDArray[np.float64]
LAYOUTS = ("adjacent", "half")


@dataclass(frozen=True, eq=False, init=False)
class RotaryAttention(SingleHead):
    r"""Softmax attention whose queries and keys are turned by angles proportional to their positions.

    A token x at position i and a token y at position j have the logit

    .. math:: s \langle R_i (Q x + b_Q), R_j (K y + b_K) \rangle = \langle A(i - j)\, x, y\rangle + \dots, \qquad
              A(i - j) = s\, K^T R_{i-j}\, Q ,

    where :math:`R_i` turns the pair number t of coordinates by the angle :math:`i\,\omega_t`,
    :math:`\omega_t = base^{-2t/r}`, :math:`r` the number of coordinates that are turned. Since :math:`R_j^T R_i =
    R_{i-j}`, only the offset counts. Unlike without positions the key bias does not cancel.

    The map acts on space-time measures; position is ``length * time``. A sequence ``(n, d)`` has times ``i / n``, so that
    its tokens sit at consecutive positions when ``length`` is n: the default, ``length=None``, takes the number of
    distinct times of positive mass, which is n for every sequence.

    Parameters
    ----------
    Q, K : array_like (k, d)
    V : array_like (e, d)
    base : float
        Base of the frequencies, above 1 (10000 in the original paper, 100000 in SmolLM2).
    layout : {"adjacent", "half"}
        Which coordinates form pairs: ``(2t, 2t+1)``, as in the paper and in GGUF files of the llama type, or ``(t, t +
        r/2)``, as in checkpoints of Hugging Face.
    rotary_dim : int, optional
        Even number r of leading coordinates that are turned, all k by default.
    frequencies : array_like (r / 2,), optional
        Any angles per position in place of those of ``base`` and ``rotary_dim``.
    scale : float, optional
        ``1 / sqrt(k)`` by default.
    query_bias, key_bias : array_like (k,), optional
    value_bias : array_like (e,), optional
    length : float, optional
        Position of time 1.
    masked : bool
        Causal mask: a token sees only atoms that are not later (default). Without it tokens see all atoms, but the map
        still needs their times.

    Raises
    ------
    ValueError
        Shapes that do not fit, an odd ``rotary_dim``, an unknown layout, a base that is not above 1.

    Notes
    -----
    Products with the Jacobian are those of softmax attention with turned queries and keys: with ``S = (R Q)(R K)^T``
    written for all tokens, ``dS = (R dQ)(R K)^T + (R Q)(R dK)^T`` and its adjoint turns back, ``R^T`` being the inverse.
    Turning is orthogonal, so ``||A(i - j)|| <= s ||K|| ||Q||`` for every offset.

    Examples
    --------
    >>> import numpy as np
    >>> head = RotaryAttention(np.eye(2), np.eye(2), np.eye(2), base=10.0)
    >>> X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    >>> head.on_tokens(X).shape, head.causal
    ((3, 2), True)
    >>> np.allclose(head.form(0), np.eye(2) / np.sqrt(2))   # no offset, no turn
    True

    References
    ----------
    Su, Lu, Pan, Murtadha, Wen, Liu, "RoFormer: enhanced transformer with rotary position embedding", 2021.
    """

    Q: Array
    K: Array
    V: Array
    query_bias: Array | None
    key_bias: Array | None
    value_bias: Array | None
    scale: float
    frequencies: Array
    """Angles per position of the pairs, ``(r / 2,)``."""
    layout: str
    length: float | None
    masked: bool
    maskable = False

    def __init__(
        self,
        Q: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
        *,
        base: float = 10_000.0,
        layout: str = "adjacent",
        rotary_dim: int | None = None,
        frequencies: ArrayLike | None = None,
        scale: float | None = None,
        query_bias: ArrayLike | None = None,
        key_bias: ArrayLike | None = None,
        value_bias: ArrayLike | None = None,
        length: float | None = None,
        masked: bool = True,
    ) -> None:
        q = check.matrix(Q, "Q")
        k, d = q.shape
        values = check.matrix(V, "V", shape=(None, d))
        if layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, received {layout!r}; see the model's code.")
        given = None if frequencies is None else check.vector(frequencies, "frequencies")
        turned = k if rotary_dim is None else check.count(rotary_dim, "rotary_dim")
        if given is not None:
            if rotary_dim is not None and rotary_dim != 2 * len(given):
                raise ValueError(
                    f"rotary_dim must be twice the number of frequencies, received {rotary_dim} and {len(given)}; give one of them."
                )
            turned = 2 * len(given)
        if turned % 2 or turned > k:
            raise ValueError(
                f"rotary_dim must be even and at most k = {k}, received {turned}; coordinates are turned in pairs."
            )
        if not check.positive(base, "base") > 1.0:
            raise ValueError(f"base must be above 1, received {base!r}; 10000 is usual.")
        values_of = {
            "Q": check.frozen(q),
            "K": check.frozen(check.matrix(K, "K", shape=(k, d))),
            "V": check.frozen(values),
            "query_bias": None if query_bias is None else check.frozen(check.vector(query_bias, "query_bias", size=k)),
            "key_bias": None if key_bias is None else check.frozen(check.vector(key_bias, "key_bias", size=k)),
            "value_bias": None
            if value_bias is None
            else check.frozen(check.vector(value_bias, "value_bias", size=len(values))),
            "scale": 1.0 / np.sqrt(k) if scale is None else check.as_float_array(scale, "scale", ndim=0).item(),
            "frequencies": check.frozen(float(base) ** (-np.arange(0, turned, 2) / turned) if given is None else given),
            "layout": layout,
            "length": None if length is None else check.positive(length, "length"),
            "masked": bool(masked),
        }
        for name, value in values_of.items():
            object.__setattr__(self, name, value)

    @property
    def causal(self) -> bool:
        """True: the map needs the times of its atoms, also without a mask."""
        return True

    def projections(self) -> Projections:
        """The affine maps of the head before its queries and keys are turned; its key bias is apart."""
        bq = None if self.query_bias is None else self.scale * self.query_bias
        return Projections(self.scale * self.Q, self.K, self.V, bq, self.value_bias)

    def in_coordinates(self, E: Array, left: Array) -> RotaryAttention:
        parts = {"Q": finite(self.Q @ E), "K": finite(self.K @ E), "V": finite(left @ self.V @ E)}
        if self.value_bias is not None:
            parts["value_bias"] = finite(left @ self.value_bias)
        return self._with(parts)

    def with_factors(self, Q: ArrayLike, K: ArrayLike, V: ArrayLike) -> RotaryAttention:
        """The same scale, biases, frequencies, layout and mask with other matrices, ``(k, d')``, ``(k, d')``, ``(e, d')``."""
        q = check.matrix(Q, "Q", shape=(len(self.Q), None))
        keys, values = check.matrix(K, "K", shape=q.shape), check.matrix(V, "V", shape=(len(self.V), q.shape[1]))
        return self._with({"Q": q, "K": keys, "V": values})

    def _with(self, parts: dict[str, Array]) -> RotaryAttention:
        out = object.__new__(RotaryAttention)
        for field in fields(self):
            value = getattr(self, field.name)
            object.__setattr__(out, field.name, check.frozen(parts[field.name]) if field.name in parts else value)
        return out

    def _rebuilt(self) -> RotaryAttention:
        names = ("frequencies", "layout", "scale", "query_bias", "key_bias", "value_bias", "length", "masked")
        return RotaryAttention(self.Q, self.K, self.V, **{name: getattr(self, name) for name in names})

    def form(self, offset: float = 0.0) -> Array:
        """The bilinear form ``A(i - j)`` of tokens that are ``offset = i - j`` positions apart, ``(d, d)``."""
        at = check.as_float_array(offset, "offset", ndim=0).reshape(1)
        return self.scale * self.K.T @ self.turn(self.Q.T, at).T

    def turn(self, z: Array, positions: Array) -> Array:
        """``R`` applied to the rows of ``z (..., m, k)`` at ``positions (m,)`` or ``(1,)``; a new array."""
        return rotate(z, positions[:, None] * self.frequencies, self.layout)

    def positions(self, times: Array, mu: Measure) -> Array:
        """Positions of ``times`` in the measure ``mu``."""
        if self.length is not None:
            return self.length * times
        assert isinstance(mu, SpaceTimeMeasure)
        return len(np.unique(mu.times[mu.weights > 0])) * times

    def _kernel(self, mu: Measure, times: Array | None, block_size: int | None) -> _RotaryKernel:
        return _RotaryKernel(self, mu, block_size)

    def _jacobian(self, mu: Measure, times: Array | None, block_size: int | None) -> JacobianOperator:
        return _RotaryJacobian(self._kernel(mu, times, block_size), times).operator()


def pairs(half: int, layout: str) -> tuple[slice, slice]:
    """First and second coordinates of the pairs."""
    if layout == "adjacent":
        return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    return slice(0, half), slice(half, 2 * half)


def rotate(z: Array, angles: Array, layout: str) -> Array:
    """Turn the pairs of the leading coordinates of ``z (..., m, k)`` by ``angles (m, r/2)`` or ``(1, r/2)``."""
    first, second = pairs(angles.shape[1], layout)
    cos, sin = np.cos(angles), np.sin(angles)
    out = np.array(z)
    a, b = z[..., first], z[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


class _RotaryKernel(NormalisedKernel):
    """The kernel with keys turned once, queries block by block.

    Keys are not centred: a shift of them would change the logits, for it is turned by each atom's own angle.
    """

    def __init__(self, map: RotaryAttention, mu: Measure, block_size: int | None) -> None:
        assert isinstance(mu, SpaceTimeMeasure)
        super().__init__(map.projections(), mu.points, mu.weights, times=mu.times, block_size=block_size)
        self.map, self.mu = map, mu
        self.positions = map.positions(mu.times, mu)
        keys = mu.points @ map.K.T
        if map.key_bias is not None:
            keys += map.key_bias
        self.K = map.turn(keys, self.positions)

    def hidden(self, times: Array | None, rows: slice) -> NDArray[np.bool_] | None:
        return super().hidden(times, rows) if self.map.masked else None

    def queries(self, x: Array) -> Array:
        """Queries before they are turned."""
        q = x @ self.head.Wq.T
        return q if self.head.bq is None else q + self.head.bq

    def weights_of(self, Q: Array, times: Array | None, rows: slice) -> Array:
        assert times is not None
        here = times[rows]
        turned = self.map.turn(Q[rows], self.map.positions(here, self.mu))
        return super().weights_of(turned, here, slice(0, len(here)))

    def field(self, x: Array, times: Array | None) -> Array:
        """``sum_j P_ij (v_j - o_i)(k_j - kbar_i)^T R_i W_q``."""
        assert times is not None
        Q = self.queries(x)
        out = np.empty((len(x), self.head.e, self.head.d))
        for rows in self.field_blocks(len(x)):
            C = self.covariance(self.weights_of(Q, times, rows))
            back = -self.map.positions(times[rows], self.mu)
            # R_i^T on the key side of each covariance: rows of (e, m, k) belong to token m
            C = np.swapaxes(self.map.turn(np.swapaxes(C, 0, 1), back), 0, 1)
            out[rows] = C @ self.head.Wq
        return out


class _RotaryJacobian(NormalisedJacobian):
    """Products in head space: turned projections of the direction, turned back in the adjoint."""

    kernel: _RotaryKernel

    def __init__(self, kernel: _RotaryKernel, times: Array | None) -> None:
        super().__init__(kernel, times)
        self.turned = kernel.map.turn(self.Q, kernel.positions)

    def jvp(self, direction: Array, extra: Array | None = None) -> Array:
        k, head = self.kernel, self.kernel.head
        dQ, dK = (k.map.turn(direction @ W.T, k.positions) for W in (head.Wq, head.Wk))
        dV = direction @ head.V.T
        out = np.empty((k.n, head.e))
        for rows, P in self.rows():
            T = dQ[rows] @ k.K.T
            T += self.turned[rows] @ dK.T
            out[rows] = _apply_softmax_derivative(P, T) @ k.Vy + P @ dV
        return out

    def vjp(self, cotangent: Array) -> tuple[Array, Array]:
        k, head = self.kernel, self.kernel.head
        dQ, dK, dV = np.empty_like(self.turned), np.zeros_like(k.K), np.zeros_like(k.Vy)
        column = np.zeros(k.n)
        for rows, P in self.rows():
            T = _apply_softmax_derivative(P, cotangent[rows] @ k.Vy.T)
            dQ[rows] = T @ k.K
            dK += T.T @ self.turned[rows]
            dV += P.T @ cotangent[rows]
            column += T.sum(axis=0)
        dQ, dK = (k.map.turn(z, -k.positions) for z in (dQ, dK))
        return dQ @ head.Wq + dK @ head.Wk + dV @ head.V, column

    def dense(self) -> Array:
        """Blocks ``P_ij (V + (v_j - o_i) g_ij^T)`` with ``g_ij = A(i - j) x_i``, and the diagonal field part."""
        k, head = self.kernel, self.kernel.head
        out = np.empty((k.n, head.e, k.n, head.d))
        field = k.field(k.y, self.times)
        for rows, P in self.rows():
            O = P @ k.Vy
            for i, Pi in zip(range(rows.start, rows.stop), P, strict=True):
                seen = np.broadcast_to(self.turned[i], k.K.shape)
                G = k.map.turn(seen, -k.positions) @ head.Wk
                block = (k.Vy - O[i - rows.start])[:, :, None] * G[:, None, :] + head.V
                out[i] = np.swapaxes(block * Pi[:, None, None], 0, 1)
                out[i, :, i] += field[i]
        return out
