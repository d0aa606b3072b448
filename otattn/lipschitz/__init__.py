r"""How much attention stretches: local constants, witnesses from below, theorems from above.

This page is the map of the theory. Every statement has its proof in the docstring of the module that it names.

**The object.** Tokens are a measure mu on R^d, attention moves them: ``F(mu) = (Gamma_mu)_# mu``. The Lipschitz
constant of F in ``W_p`` over the measures on a domain is what is enclosed; n equal tokens, or any measure (``n=None``).
Along the straight path of an optimal coupling the image moves at most as fast as the operator norm of the derivative
of ``mu -> Gamma_mu`` on ``L^p(mu)``, so a bound of that operator at every measure of the domain's convex hull is a
Lipschitz constant. For softmax attention with logits ``<g(x), y>``, ``g(x) = A x + c``, it is

.. math:: V (K + D), \qquad (K\epsilon)(x) = E_{P_x}[(I + (y - m_x) g(x)^T)\,\epsilon(y)], \qquad
          (D\epsilon)(x) = C_x A\,\epsilon(x),

with the mean ``m_x`` and covariance ``C_x`` of the attention weights ``P_x``.

**At one measure** (:mod:`~otattn.lipschitz.local.value`): the particle part is ``||W^{1/2} J W^{-1/2}||``, the splitting part
``max_i ||D_x Gamma_mu(x_i)||`` counts atoms that fall apart, the far-mass part masses that may go anywhere. Orders 1 and
inf are in :mod:`~otattn.lipschitz.local.mixed_norms`; a proven value in one pass in :mod:`~otattn.lipschitz.local.at_measure`.
Layers in depth, composed against the product of their constants: :mod:`~otattn.lipschitz.local.depth`.

**From below** (:mod:`~otattn.lipschitz.lower.best`): n tokens in c distinct places have a ``(c d) x (c d)`` problem
(:mod:`~otattn.lipschitz.lower.clusters`), so n may be a million. Witnesses: a cluster and two anchors across its gradient, with
the leading constant ``c* R^2 sqrt(n)`` (:mod:`~otattn.lipschitz.lower.witnesses`); three atoms with the growth ``e^{kappa/2}``
(:mod:`~otattn.lipschitz.lower.mean_field_witnesses`); then ascent. Every value is recomputed from the map's Jacobian.

**From above**, for softmax attention, ``a = ||A|| R^2``, ``v = ||V||``, ``sigma = sup ||V C A||``:

====================  =====================================================  ==============================================
statement             bound of the constant                                  proof
====================  =====================================================  ==============================================
field part            ``sigma``, exact on balls and ellipsoids               :mod:`~otattn.lipschitz.constants.field`
row bound             about ``v a sqrt(n/2)``, every n                       :mod:`~otattn.lipschitz.upper.softmax`
column bound          ``v (a + e^{kappa/2} sqrt(1 + a^2))``, any measure     :mod:`~otattn.lipschitz.upper.softmax`
density bound         the same with ``kappa = 2a`` sharpened                 :mod:`~otattn.lipschitz.upper.softmax`
W_inf                 ``v (a + sqrt(1 + a^2))``, neither n nor exponential   :mod:`~otattn.lipschitz.upper.softmax`
rows and columns      a joint program over the two tokens that move most     :mod:`~otattn.lipschitz.upper.rows_and_columns`
mean-field            sharper column sums by entropy                         :mod:`~otattn.lipschitz.upper.mean_field`
PSD forms             small a, a row still sees its own token                :mod:`~otattn.lipschitz.upper.psd`
PSD, any measure      covariances of columns, variances of rows              :mod:`~otattn.lipschitz.forms.psd_mean_field`
logit gaps            a column pays by its gap to the row's largest logit    :mod:`~otattn.lipschitz.forms.logit_gap`
whole rows            K and D of a row together; what its own token takes    :mod:`~otattn.lipschitz.forms.frontier_rows`
A = -alpha I          anchors that others use have dead rows                 :mod:`~otattn.lipschitz.forms.negative_identity`
Sinkhorn, A = A^T     a form over pairs of tokens, positive kernels          :mod:`~otattn.lipschitz.forms.sinkhorn_symmetric`
two tokens            along and across their difference; quadratic forms     :mod:`~otattn.lipschitz.forms.two_tokens`
masked                conditional W_p                                        :mod:`~otattn.lipschitz.upper.masked`
L2, rotary            logit gradients that depend on the key                 :mod:`~otattn.lipschitz.upper.l2`
unnormalised          ``v sup(|h| + a |h'|)``                                :mod:`~otattn.lipschitz.upper.unnormalised`
several heads         the best shares of a simplex                           :mod:`~otattn.lipschitz.upper.multi_head`
whole blocks          products of the parts' constants on their regions      :mod:`~otattn.lipschitz.upper.blocks`
near given tokens     intervals of the attention weights                     :mod:`~otattn.lipschitz.upper.near_tokens`
stacks near tokens    ``||J|| + C r + ..``, norms of partial products at X   :mod:`~otattn.lipschitz.upper.second_order`
the three estimates   size and slopes of the field, every variant            :mod:`~otattn.lipschitz.regularity.fixed_query`
Gaussian measures     Bures-Wasserstein, local                               :mod:`~otattn.lipschitz.local.gaussian`
====================  =====================================================  ==============================================

``kappa = max <g(x), y - x>`` is ``a/4`` for ``A = alpha I``, ``2a`` for ``A = -alpha I`` and ``a`` for a skew A. The baselines
(Castin, Ablin, Peyre 2024; Geshkovski et al. 2023; Kim, Papamakarios, Mnih 2021) are in
:mod:`~otattn.lipschitz.upper.published`; some of theirs that we could not confirm as quoted are restated there with a proof.
What they print and what holds, with counterexamples of two lines: :mod:`~otattn.lipschitz.papers`.

**Trust.** An upper bound carries its statement: the map, the domain, n, p, and which quantity it bounds. Whoever uses it
checks that it covers what is needed (:meth:`~otattn.lipschitz.bound.Bound.covers`). ``verify()`` proves the value again from
the statement alone, and ``verify(attention, domain=, n=, p=)`` answers for the caller's own. A relaxation returns a
:class:`~otattn.lipschitz.relaxations.Certificate` with the multipliers that some solver proposed; nothing that a solver claims
is used, and cells are bounded at their corners, never sampled.

What is proved: ``verify()`` computes in float64, with margins for rounding that are derived for each step but rest on LAPACK's
backward errors. ``verify(rigorous=True)`` (extra ``proof``) runs the same formulas on balls and intervals: the value bounds
the constant of the map whose entries are the given floats, taken as exact numbers. Matrices are products of balls of 192 bits
(:mod:`~otattn.lipschitz.arithmetic.balls`), an eigenvalue is confirmed by a factorisation whose residual is enclosed,
scalars and cells are intervals that every operation rounds outward (:mod:`~otattn.lipschitz.arithmetic.intervals`; they trust
numpy's exponentials to be right within 4 units in the last place). It is offered for every theorem but four, which say so:
the ball around given tokens, the certificates of second order, the bound at one measure, and the published bound of L2
attention on all of R^d.
"""

from otattn.lipschitz import bounds, relaxations
from otattn.lipschitz.bound import Bound, Enclosure
from otattn.lipschitz.catalogue import Catalogue, theorems
from otattn.lipschitz.comparison import RealAgainstAdversarial, real_against_adversarial
from otattn.lipschitz.edits import EditStability, edit_stability
from otattn.lipschitz.enclosure import EnclosureTable, enclose_lipschitz, enclosure_table
from otattn.lipschitz.local.at_measure import at_measure_bound
from otattn.lipschitz.local.batch import local_lipschitz_batch
from otattn.lipschitz.local.depth import DepthProfile, depth_profile
from otattn.lipschitz.local.gaussian import gaussian_local_constant
from otattn.lipschitz.local.growth import Exponent, LocalGrowth, fit_exponent, local_growth
from otattn.lipschitz.local.value import LocalLipschitz, local_lipschitz
from otattn.lipschitz.lower.best import adversarial_tokens, lipschitz_lower_bound
from otattn.lipschitz.regularity.estimates import Estimates, estimates
from otattn.lipschitz.upper.second_order import certified_radius, certify
from otattn.lipschitz.upper_bound import lipschitz_upper_bound

__all__ = [
    "Bound",
    "Catalogue",
    "DepthProfile",
    "EditStability",
    "Enclosure",
    "EnclosureTable",
    "Estimates",
    "Exponent",
    "LocalGrowth",
    "LocalLipschitz",
    "RealAgainstAdversarial",
    "adversarial_tokens",
    "at_measure_bound",
    "bounds",
    "certified_radius",
    "certify",
    "depth_profile",
    "edit_stability",
    "enclose_lipschitz",
    "enclosure_table",
    "estimates",
    "fit_exponent",
    "gaussian_local_constant",
    "lipschitz_lower_bound",
    "lipschitz_upper_bound",
    "local_growth",
    "local_lipschitz",
    "local_lipschitz_batch",
    "real_against_adversarial",
    "relaxations",
    "theorems",
]
