r"""What a law gains when it is coupled with itself: covariance less information.

Let alpha be a law on R^d, A symmetric PSD, and B the variance of ``z = <u, A^{1/2} x>`` under alpha for a unit vector u. There is
a coupling pi of alpha with itself with

.. math:: Cov_\pi(Ax, x') - KL(\pi | \alpha\times\alpha) \ge gain(B) = \max_{0\le t<1} B t + \tfrac12 \log(1 - t^2) .

Here ``Cov_pi(A x, x') = E <A x, x'> - <A xbar, xbar>``, xbar the mean of alpha. Equality holds for Gaussians on a line.

*Proof.* Let x, x' be independent given ``Y = z + noise``, Gaussian noise of variance ``s^2 = B (1 - t)/t``, ``0 < t < 1``, each
with the law of x given Y. The covariance is ``E |A^{1/2}(E[x|Y] - xbar)|^2 >= C``, ``C = Var E[z|Y] >= t B`` (the best linear
predictor does no better). With ``z' = <u, A^{1/2} x'>``, ``KL(pi|alpha x alpha) = I(x;x') <= I(z;z') = I(z;Y) - I(z;Y|z') = h(Y) +
h(Y|z,z') - log(2 pi e s^2)``: z and z' are independent given Y, and ``(z',Y)`` has the law of ``(z,Y)``, so that ``h(Y|z) = h(Y|z')
= log(2 pi e s^2)/2``. Gaussians have the largest entropies: ``h(Y) <= log(2 pi e B/t)/2``, ``h(Y|z,z') <= log(2 pi e L)/2`` with
``L = B/t - 2B^2/(B + C)``, the error of the best multiple of ``z + z'`` as a predictor of Y (``Cov(Y,z) = Cov(Y,z') = B``,
``Cov(z,z') = C``). So the left side is at least ``C - log(B L/(t s^4))/2``. Its slope in C is ``1 - B^2/((B + C)^2 L)``, which
increases and at ``C = t B`` equals ``1 - t/(B (1 - t^2))``. For the t with ``t/(1 - t^2) = B`` the least value is there, ``B t +
log(1 - t^2)/2``, and this t maximises it. []
"""

from __future__ import annotations

from typing import Any

import numpy as np


def gain(B: Any) -> Any:
    """``max_t B t + log(1 - t^2)/2``, at ``t = 2B / (1 + sqrt(1 + 4 B^2))``; increasing in B."""
    half = 0.5 + 0.5 * np.sqrt(1.0 + 4.0 * B * B)
    return B * B / half - 0.5 * np.log(half)  # 1 - t^2 = 1 / half
