r"""What the papers print and what holds: four statements that fail as printed, each with two lines that show it.

Notation as in :mod:`otattn.lipschitz`: logits ``<A x, y>``, values ``V y``, tokens in the ball of radius R, ``a = ||A||
R^2``, ``v = ||V||``. Where a statement was known to us from a talk or a quotation only, it says so.

>>> import numpy as np

**1. A causal mask does not keep the mean-field constant.**

*Hypotheses.* Causal softmax attention on measures on ``[0, 1] x B_R``, in the conditional ``W_2`` (on a sequence: the
mean square of ``|x_i - y_i|``).
*Printed* (slides on [CAP24]). The unmasked bound ``v (1 + 3a) e^{2a}`` holds under a mask as well.
*Fails.* A = 0, V = 1: token i becomes the mean of tokens 1 to i. From (0, 0) to (1, .447) the bound is 1.

>>> d = np.array([1.0, 0.447])
>>> round(float(np.linalg.norm(np.cumsum(d) / [1, 2]) / np.linalg.norm(d)), 3)
1.127

*Holds.* ``sigma + v inf_r N_r (2E / (2-r))^{1/r}``, ``E = e^{2t}``, r in [1, 2), for every measure
(:func:`~otattn.lipschitz.upper.masked.masked_average_bound`). For A = 0 it is ``2 v``, Hardy's constant, and no less
will do. *Proof.* Let ``y_i`` be the mean of ``x_1 .. x_i``, so ``x_i = i y_i - (i-1) y_{i-1}``. Then ``y_i^2 - 2 x_i y_i =
(1 - 2i) y_i^2 + 2 (i-1) y_i y_{i-1} <= (i-1) y_{i-1}^2 - i y_i^2``, and the sum over i is at most 0: ``|y|^2 <= 2 <x, y>
<= 2 |x| |y|``. Conversely ``x_i = i^{-1/2}`` has ``y_i >= 2 (sqrt(i+1) - 1) / i >= 2 i^{-1/2} - 2/i``, so ``|y|^2 / |x|^2
>= 4 - 8 zeta(3/2) / (1 + 1/2 + ... + 1/n)``, which tends to 4. (For two tokens the constant is 1.144.) What fails is
the column sum: without a mask it is at most ``e^kappa``, here the first token is seen by every row.

**2. One query, n Diracs: the constant is not** ``||A|| R^2``.

*Hypotheses.* ``c_p(x)`` is the Lipschitz constant of ``mu -> Gamma_mu(x)`` from ``W_p``, over n equal atoms in the
ball; V = I, ``|x| <= R``, ``t = |A x| R``.
*Printed* (slides, the third refined estimate). ``c_p(x) <= ||A|| R^2``.
*Fails* for p = 2. A = -1, R = 3, x = 3, one atom at -3 and 99 at 3: the query sees the one only; it moves by h, the image
too, and ``W_2`` is ``h / sqrt(n)``. Printed: at most 9.

>>> image = lambda y: y @ np.exp(-3 * y) / np.exp(-3 * y).sum()
>>> y = 3.0 - 6.0 * (np.arange(100) == 0); round(float(image(y + 0.001 * (y < 0)) - image(y)) / (0.001 / 100**0.5), 3)
10.0

*Holds.* ``c_2 <= min(sqrt(n) phi(t), Psi_n(t))``, with :func:`~otattn.lipschitz.constants.rows.row_norm` and
:func:`~otattn.lipschitz.constants.rows.density_constant`, proofs there; for every p and variant in
:func:`~otattn.lipschitz.regularity.fixed_query.fixed_query_bound`. So the law is ``R^2 sqrt(n/2)``: with two atoms at ``+-R
u``, u orthogonal to A x, and the others where the query does not look, this example in the plane has 63 and the bound 64.3.
For p = inf, ``c <= sqrt(1 + t^2)`` knows no n.

**3. Tied L2 attention is of degree 2 in** ``W_Q``.

*Hypotheses.* H heads ``P^h X A_h W_V^h``, ``A_h = W_Q^h (W_Q^h)^T / sqrt(D/H)``, ``P^h`` the softmax of ``-|(x_i - x_j)
W_Q^h|^2 / sqrt(D/H)``, output ``W_O``; all of ``R^D``, N tokens, ``phi(x) = x e^{x+1}``.
*Printed* ([KPM21] Theorem 3.2, as quoted to us). ``sqrt(N) / sqrt(D/H) (4 phi^{-1}(N-1) + 1) (sum_h ||W_Q^h||^2
||W_V^h||^2)^{1/2} ||W_O||``.
*Fails.* N = D = H = 1, ``W_Q = 2``, ``W_V = W_O = 1``: the map is ``x -> 4 x``, the printed constant 2.

>>> W_Q, W_V, W_O = 2.0, 1.0, 1.0
>>> 1.0 * W_Q * W_Q * W_V * W_O - 0.0, (4 * 0 + 1) * (W_Q**2 * W_V**2) ** 0.5 * W_O
(4.0, 2.0)

*Holds.* The same with ``||W_Q^h||^4`` (:func:`~otattn.lipschitz.upper.published.kim2021_l2`, proof there). The degree is forced:
``c W_Q`` at ``X / c`` has the same ``P^h`` and c times the image, so the constant of ``c W_Q`` is ``c^2`` times that of
``W_Q``.

**4. Power iteration takes the tangent of jvp, not its value.**

*Hypotheses.* ``||J||`` of a map f at X by ``u <- J^T (J u)``, normalised; ``torch.func.jvp`` returns ``(value, tangent)``
and ``J u`` is output 1.
*Printed* (published code for local constants, as reported to us). Output 0, the value ``f(X)``, in the place of ``J u``.
*Fails.* The iteration then returns ``|J^T f(X)|^{1/2}`` whatever u is. For the map ``x -> 2 x`` at x = 3:

>>> jvp = lambda f, x, u: (f(x), (f(x + 1e-6 * u) - f(x)) / 1e-6)  # in the order of torch.func.jvp
>>> [round(part, 6) for part in jvp(lambda x: 2 * x, 3.0, 1.0)]  # the constant of this map is 2 at every x
[6.0, 2.0]

*Holds.* With the tangent, ``|J^T J u|^{1/2}`` grows to ``||J||`` for almost every start;
:func:`~otattn.lipschitz.local.value.local_lipschitz` uses analytic products and Lanczos iteration instead.

References
----------
.. [CAP24] Castin, Ablin, Peyre, "How Smooth Is Attention?", ICML 2024.
.. [KPM21] Kim, Papamakarios, Mnih, "The Lipschitz constant of self-attention", ICML 2021.
"""

from __future__ import annotations

__all__: list[str] = []
