r"""What a law gains when it is coupled with itself: covariance less information.

Let alpha be a law on R^d, A symmetric PSD, ``u_k`` orthonormal vectors, and ``B_k`` the variance of ``z_k = <u_k, A^{1/2} x>``
under alpha. There is a coupling pi of alpha with itself with

.. math:: Cov_\pi(Ax, x') - KL(\pi | \alpha\times\alpha) \ge \sum_k gain(B_k), \qquad
          gain(B) = \max_{0\le t<1} B t + \tfrac12 \log(1 - t^2) .

Here ``Cov_pi(A x, x') = E <A x, x'> - <A xbar, xbar>``, xbar the mean of alpha. Equality holds for Gaussians. One vector suffices
for a bound free of d; all of a basis, with the same t for each, give ``t tr Cov_alpha(A^{1/2} x) + (d/2) log(1 - t^2)``.

*Proof.* Coordinates without variance add ``gain(0) = 0`` and are left out. Let x, x' be independent given ``Y = z + noise``,
independent Gaussian noises of variance ``s_k^2 = B_k (1 - t_k)/t_k``, ``0 < t_k < 1``, each with the law of x given Y. The
covariance is ``E |A^{1/2}(E[x|Y] - xbar)|^2 >= sum_k C_k``, ``C_k = Var E[z_k|Y] >= t_k B_k`` (the best linear predictor does no
better). ``KL(pi|alpha x alpha) = I(x;x') <= I(x;Y) - I(x;Y|x') = h(Y) + h(Y|x,x') - sum_k log(2 pi e s_k^2)``: x and x' are
independent given Y, ``(x',Y)`` has the law of ``(x,Y)``, and ``h(Y|x) = h(Y|x') = sum_k log(2 pi e s_k^2)/2``. Entropies are at
most the sums of those of the coordinates, and Gaussians have the largest: ``h(Y_k) <= log(2 pi e B/t)/2``, ``h(Y_k|z_k,z_k') <=
log(2 pi e L)/2`` with ``L = B/t - 2B^2/(B + C)``, the error of the best multiple of ``z_k + z_k'`` as a predictor of ``Y_k``
(``Cov(Y,z) = Cov(Y,z') = B``, ``Cov(z,z') = C``; the index k is left out). So the left side is at least the sum of ``C - log(B
L/(t s^4))/2``. Its slope in C is ``1 - B^2/((B + C)^2 L)``, which increases and at ``C = t B`` equals ``1 - t/(B (1 - t^2))``. For
the t with ``t/(1 - t^2) = B`` the least value is there, ``B t + log(1 - t^2)/2``, and this t maximises it. []
"""

from __future__ import annotations

from typing import Any

import numpy as np


def gain(B: Any) -> Any:
    """``max_t B t + log(1 - t^2)/2``, at ``t = 2B / (1 + sqrt(1 + 4 B^2))``; increasing in B."""
    half = 0.5 + 0.5 * np.sqrt(1.0 + 4.0 * B * B)
    return B * B / half - 0.5 * np.log(half)  # 1 - t^2 = 1 / half
