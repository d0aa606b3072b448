"""The steps of the psd bound, one test each: ranges on boxes against the definitions at points of them, in many digits."""

from dataclasses import replace

import mpmath as mp
import numpy as np
import pytest
from psd_terms import reach as reach_of
from psd_terms import some_multipliers, square, term
from scipy.special import xlogy

from otattn.lipschitz.upper.psd_columns import Columns
from otattn.lipschitz.upper.psd_multipliers import Multipliers
from otattn.lipschitz.upper.psd_rows import Range

SETTINGS = [(2, 3.0, 1.0), (3, 9.0, 2.0), (8, 0.5, 30.0), (64, 25.0, np.inf)]
each_setting = pytest.mark.parametrize(("n", "a", "stretch"), SETTINGS)
each_chi = pytest.mark.parametrize("chi", [0.0, 0.3, 1.0])
each_power = pytest.mark.parametrize("power", [0.0, 1.0, 1.5, 2.0])
POINTS = 12


def columns(n, a, stretch, power=0.0, chi=0.0):
    return Columns(a, a, stretch, n, 3, (1.3, 2.5, 0.4), 0.7, 1.9, 0.2, power, chi)


def boxes(c, rng, count=25):
    """Boxes ``lo, hi (4, count)`` about possible rows, and points of them ``(4, POINTS, count)``."""
    found = []
    while len(found) < count:
        r, h = rng.random(2)
        odds = c.a * (r * h * rng.uniform(-1, 1) - h * h)  # log(p / q)
        low, high = np.log(max(c.n - 2, 1)) - c.a * (h + h * h), np.log(max(c.n - 2, 1)) + c.a * (h - h * h)
        others = rng.uniform(low, high) if c.n > 2 else -np.inf  # log(rho / q)
        lq = -np.logaddexp(np.logaddexp(0.0, odds), others)
        found.append((r, h, odds + lq, lq))
    z = np.array(found).T
    side = np.array([[0.2], [0.2], [0.5], [0.5]]) * 10 ** (-3 * rng.random(count)) * rng.random(z.shape)
    at = rng.random(z.shape)
    lo = np.maximum(z - at * side, [[0.0], [1e-3], [-60.0], [-60.0]])
    hi = np.maximum(np.minimum(z + (1 - at) * side, [[1.0], [0.999], [-1e-9], [-1e-9]]), lo)
    share = rng.random((4, POINTS, count))
    share[:, 0], share[:, 1] = 0.0, 1.0
    return lo, hi, lo[:, None] + share * (hi - lo)[:, None]


def inside(values, bounds, scale=1.0):
    """Whether ``(POINTS, count)`` numbers lie in the ranges, up to the rounding of numbers of this scale."""
    slack = 1e-12 * scale * (1 + np.abs(values))
    return (values >= bounds.lo - slack).all() and (values <= bounds.hi + slack).all()


def derivative(f, point, axis):
    """In 40 digits; ``point`` is a list of floats."""
    with mp.workdps(40):
        return float(
            mp.diff(lambda x: f(*[mp.mpf(x) if k == axis else mp.mpf(v) for k, v in enumerate(point)]), point[axis])
        )


def test_ranges_hold_sums_and_products() -> None:
    rng = np.random.default_rng(0)
    x0, x1 = np.sort(rng.normal(size=(2, 500)), axis=0)
    y0, y1 = np.sort(rng.normal(size=(2, 500)), axis=0)
    X, Y = Range(x0, x1), Range(y0, y1)
    x, y = x0 + rng.random((20, 500)) * (x1 - x0), y0 + rng.random((20, 500)) * (y1 - y0)
    for values, bounds in ((x + y, X + Y), (x - y, X - Y), (x * y, X * Y), (-2.0 * x, -2.0 * X), (np.exp(x), X.exp())):
        assert inside(values, bounds)
    # and no more than that: both ends are met
    corners = np.stack([x0 * y0, x0 * y1, x1 * y0, x1 * y1])
    assert np.array_equal((X * Y).lo, corners.min(axis=0))
    assert np.array_equal((X * Y).hi, corners.max(axis=0))
    assert np.array_equal(X.size(), np.maximum(np.abs(x0), np.abs(x1)))


@each_setting
def test_possible_rows_are_kept_and_impossible_ones_are_not(n, a, stretch) -> None:
    rng = np.random.default_rng(1)
    c = columns(n, a, stretch)
    lo, hi, _ = boxes(c, rng, 200)
    assert c.possible(c.box(lo, hi)).all()
    r, h = rng.random((2, 200))
    lq = np.log(rng.uniform(0.01, 0.4, 200))
    for z in (
        # |l_ij| = |a h^2 + log(p / q)| above a r h
        np.array([r, h, np.full(200, -1e-3) + lq + a * (r * h - h * h) + 0.01, lq]),
        np.array([r, h, lq - a * (r * h + h * h) - 0.01, lq]),
        # p + q above one
        np.array([r, h, np.log1p(-np.exp(lq)) + 1e-3, lq]),
    ):
        assert not c.possible(c.box(z, z)).any()
    if n > 2:
        # no smaller rho than 1e-6, so that the slack of 1e-10 does not count
        h = h * min(1.0, 5.0 / a)
        # rho below (n - 2) q e^{-a (h + h^2)} or above (n - 2) q e^{a (h - h^2)}, with p = q e^{-a h^2}: l_ij = 0
        for others in (-a * (h + h * h) - 0.01, a * (h - h * h) + 0.01):
            lq = -np.log1p(np.exp(-a * h * h) + (n - 2) * np.exp(others))
            z = np.array([r, h, lq - a * h * h, lq])
            assert not c.possible(c.box(z, z)).any()


@each_setting
def test_the_plane_touches_the_entropies_and_lies_below_them(n, a, stretch) -> None:
    c = columns(n, a, stretch)
    lo, hi, _ = boxes(c, np.random.default_rng(2))
    plane = c.plane(c.box(lo, hi))

    def entropies(p, q):
        rho = np.maximum(1 - p - q, 0.0)
        return -np.log(q) + xlogy(p, p) + xlogy(q, q) + (xlogy(rho, rho / (n - 2)) if n > 2 else 0.0)

    grid = np.linspace(1e-6, 1.0, 150)
    p, q = (x.ravel()[:, None] for x in np.meshgrid(grid, grid))
    # two tokens leave nothing to others: p and q are free of each other in the formula
    keep = (p + q <= 1.0)[:, 0] if n > 2 else slice(None)
    p, q = p[keep], q[keep]
    low = plane.e0 + plane.ep * (p - plane.pt) + plane.eq * (q - plane.qt)
    scale = 1 + np.abs(plane.e0) + np.abs(plane.ep) + np.abs(plane.eq)
    assert (low <= entropies(p, q) + 1e-12 * scale).all()
    assert np.abs(plane.e0 - entropies(plane.pt, plane.qt)).max() <= 1e-11


def with_losses(c, box, rng):
    """The boxes with losses, and losses of them ``(POINTS, count)``."""
    low = np.asarray(c.price(box).hi) * rng.random(box.p.lo.shape) * 0.5
    high = low + 0.3 * np.asarray(c.price(box).hi) * rng.random(low.shape)
    return replace(box, loss=Range(low, high)), low + rng.random((POINTS, low.size)) * (high - low)


@each_chi
@each_setting
def test_the_reach_and_the_losses_hold_their_values_at_points(n, a, stretch, chi) -> None:
    rng = np.random.default_rng(3)
    c = columns(n, a, stretch, chi=chi)
    lo, hi, z = boxes(c, rng)
    box, (_, h, lp, lq) = c.box(lo, hi), z
    plane, (E, reached) = c.plane(box), c.mean_range(c.plane(box), box)
    p, q = np.exp(lp), np.exp(lq)
    flat = a * h**2 + plane.e0 + plane.ep * (p - plane.pt) + plane.eq * (q - plane.qt)
    scale = 1 + np.abs(plane.e0) + np.abs(plane.ep) + np.abs(plane.eq)
    assert inside(np.maximum(flat, 0.0), E, 1e3 * scale)
    assert reached[(flat <= a * h).any(axis=0)].all()
    reach = reach_of(c, (lo[0], hi[0]), h, p, q, flat)
    tilted, middle = c.tilted(plane, box), c.middle(lo, hi, box.loss)
    assert inside(np.maximum(flat - chi / 2 * (a * h**2 + lp - lq), 0.0), tilted, 1e3 * scale)
    assert inside(reach, c.reach(plane, box, middle, tilted), 1e3 * scale * (1 + a) ** 2)
    # at any r of the box the bound of lambda is no more
    for r in (lo[0], 0.3 * lo[0] + 0.7 * hi[0], hi[0]):
        assert (reach_of(c, (r, r), h, p, q, flat) <= reach + 1e-9 * (1 + a) ** 2).all()
    m = [x.lo for x in (middle.h, middle.p, middle.q)]
    Em = a * m[0] ** 2 + plane.e0 + plane.ep * (m[1] - plane.pt) + plane.eq * (m[2] - plane.qt)
    centre = reach_of(c, (lo[0], hi[0]), *m, Em)
    assert c.reach_at(plane, middle) == pytest.approx(centre, rel=1e-9, abs=1e-9 * (1 + a) ** 2)
    box, loss = with_losses(c, box, rng)
    span = c.reach(plane, box, c.middle(lo, hi, box.loss), tilted)
    gamma = c.gamma(span, box)
    assert inside(np.maximum(reach - loss, gamma.lo), gamma, 1e3 * scale * (1 + a) ** 2)
    price = (a * h) ** 2 * (1 - p)
    assert inside(price, c.price(box))
    assert inside(loss / price, c.gap(box), 10.0)
    own = np.maximum(1 - square(c, h) + chi * (1 + h**2 + (lp - lq) / a), 0.0)
    assert inside((a * h) ** 2 * q * own, c.least_loss(box))
    cap = [
        [min(4 * x * (1 - x) if y > 0.5 else 1.0 for x, y in zip(t, s, strict=True)) for t, s in pairs]
        for pairs in (
            zip(np.exp(hi[2:].T), np.exp(lo[2:].T), strict=True),
            zip(np.exp(lo[2:].T), np.exp(lo[2:].T), strict=True),
        )
    ]
    assert np.array_equal(c.cap(box).lo, np.minimum(cap[0], c.largest(box)))
    assert np.array_equal(c.cap(box).hi, np.minimum(cap[1], c.largest(box)))


@each_chi
@each_setting
def test_slopes_hold_the_derivatives_at_points(n, a, stretch, chi) -> None:
    rng = np.random.default_rng(4)
    c = columns(n, a, stretch, chi=chi)
    lo, hi, z = boxes(c, rng, 6)
    box, plane = c.box(lo, hi), c.plane(c.box(lo, hi))
    box, losses = with_losses(c, box, rng)
    middle, E = c.middle(lo, hi, box.loss), c.tilted(plane, box)
    many = some_multipliers(rng, 6, c.omega, n)
    tilt = c.tilt(many, hi[0])
    reach = c.reach(plane, box, middle, E)
    slopes = c.reach_slopes(box, E, plane)._replace(loss=Range.of(-np.ones(6)))
    in_gamma, in_term = c.thinned_slopes(c.gamma(reach, box), slopes, box), c.term_slopes(box, tilt)
    capped = [c.capped(box, middle, own=own) for own in (False, True)]
    for k in range(6):
        e = [mp.mpf(x[k]) for x in plane]
        mu, nu, sigma, _, t, zeta, phi, s = (float(getattr(many, key)[k]) for key in Multipliers.names())
        left = max(phi - nu * (s - t), 0.0)
        along = mu - 2 * (mu - nu * t - phi + left) * sigma
        missing, (r0, r1) = 1 - float(square(c, hi[0, k])), (float(lo[0, k]), float(hi[0, k]))

        def short(h, lp, lq):
            return (1 - min(1, c.stretch * h**2) if np.isfinite(stretch) else 0 * h) + chi * (1 + h**2 + (lp - lq) / a)

        def gamma(h, lp, lq, loss, e=e, missing=missing, r0=r0, r1=r1):
            p, q = mp.exp(lp), mp.exp(lq)
            flat = a * h**2 + e[0] + e[1] * (p - e[3]) + e[2] * (q - e[4]) - chi / 2 * (a * h**2 + lp - lq)
            seen = 1 - p * missing + chi * (1 - p + chi * r1**2 / 4 - p * r0**2)
            return ((a * h) ** 2 * seen - max(flat, 0) ** 2 - loss) / (1 + c.omega * a * h**2)

        def rest(h, lp, lq, loss, mu=mu, nu=nu, t=t, zeta=zeta, along=along, left=left):
            crowd = mp.log(1 + zeta * loss / ((a * h) ** 2 * (1 - mp.exp(lp)))) - mp.log(1 + zeta * short(h, lp, lq))
            value = mu * (mp.log(1 - mp.exp(lp)) - lp) + along * (a * h**2 + lp - lq) + (left - nu * t) * a * h**2
            return value + nu * crowd

        for point, loss in zip(z[1:, :, k].T[:5], losses[:5, k], strict=True):
            point = [*point.tolist(), float(loss)]
            for axis, name in enumerate(("h", "lp", "lq", "loss")):
                for f, sides in (
                    (gamma, in_gamma),
                    (rest, in_term),
                    (lambda h, lp, *_: 4 * (a * h) ** 2 * mp.exp(lp) * (1 - mp.exp(lp)), capped[0][2]),
                    (lambda h, _, lq, __: 4 * (a * h) ** 2 * mp.exp(lq) * (1 - mp.exp(lq)), capped[1][2]),
                ):
                    if f is not gamma and f is not rest and np.exp(lo[2 if sides is capped[0][2] else 3, k]) <= 0.5:
                        continue
                    if f is gamma and float(gamma(*point)) < 0:
                        continue  # Gamma is zero there
                    side, value = getattr(sides, name), derivative(f, point, axis)
                    low, high = (np.broadcast_to(x, 6)[k] for x in (side.lo, side.hi))
                    slack = 1e-9 * (1 + abs(value) + a * a)
                    assert low - slack <= value <= high + slack, (name, k)
    for (value, span, _), lx, at in zip(capped, (z[2], z[3]), (middle.p.lo, middle.q.lo), strict=True):
        one = np.exp(lx).min(axis=0) > 0.5
        inner = 4 * (a * z[1]) ** 2 * np.exp(lx) * (1 - np.exp(lx))
        assert inside(inner[:, one], Range(span.lo[one], span.hi[one]))
        assert value == pytest.approx(4 * (a * middle.h.lo) ** 2 * at * (1 - at), rel=1e-12)


@each_chi
@each_power
@each_setting
def test_the_best_loss_lies_in_its_range(n, a, stretch, power, chi) -> None:
    """The largest term over all losses that a row can have is the largest over the range of its box."""
    rng = np.random.default_rng(8)
    c = columns(n, a, stretch, power, chi)
    lo, hi, z = boxes(c, rng, 40)
    box, plane = c.box(lo, hi), c.plane(c.box(lo, hi))
    E = c.tilted(plane, box)
    many = some_multipliers(rng, 40, c.omega, n)
    reach = c.reach(plane, box, c.middle(lo, hi, box.loss), E)
    best = c.at_best_losses(box, reach, c.tilt(many, hi[0])).loss
    r, h, p, q = hi[0], z[1], np.exp(z[2]), np.exp(z[3])
    flat = a * h**2 + plane.e0 + plane.ep * (p - plane.pt) + plane.eq * (q - plane.qt)
    most = reach_of(c, (lo[0], hi[0]), h, p, q, flat)
    price = (a * h) ** 2 * (1 - p)
    least = (a * h) ** 2 * q * np.maximum(1 - square(c, h) + chi * (1 + h**2 + np.log(p / q) / a), 0.0)
    cap = np.where(p > 0.5, np.where(np.exp(lo[2]) > 0.5, 4 * p * (1 - p), 1.0), 1.0)
    cap = np.minimum(cap, np.where(np.exp(lo[3]) > 0.5, 4 * q * (1 - q), 1.0))
    cap = np.minimum(cap, c.largest(box)) * (a * h) ** 2
    top = np.minimum(most, (1 + 2 * chi) * price)
    possible = top >= least

    def value(loss):
        gamma = np.clip(most - loss, 0.0, cap)
        with np.errstate(invalid="ignore"):
            return term(c, many, r, h, p, q, loss / price, gamma)

    # the term rises up to its largest value and falls beyond: a step to the range is a step up
    for x in np.linspace(0.0, 1.0, 400):
        loss = least + x * (top - least)
        step = value(np.clip(loss, best.lo, best.hi)) - value(loss)
        assert (step >= -1e-9 * (1 + a))[possible].all()
    assert (best.hi - best.lo < 0.9 * np.max(top - least, axis=0))[possible.any(axis=0)].sum() > 5
    assert possible.sum() > 100


def test_capped_gamma_is_tested_on_large_shares() -> None:
    rng = np.random.default_rng(5)
    c, count = columns(4, 4.0, 2.0), 200
    lo = np.stack([rng.random(count), rng.random(count), np.log(rng.uniform(0.5, 0.9, count)), np.full(count, -3.0)])
    hi = np.minimum(lo + 0.1 * rng.random((4, count)), -1e-9 * np.array([[-1e9], [-1e9], [1], [1]]))
    for own in (False, True):
        if own:
            lo, hi = lo[[0, 1, 3, 2]], hi[[0, 1, 3, 2]]
        box = c.box(lo, hi)
        middle = c.middle(lo, hi, box.loss)
        value, span, slopes = c.capped(box, middle, own=own)
        h = lo[1] + rng.random((20, count)) * (hi - lo)[1]
        lx = (lo + rng.random((20, 1, count)) * (hi - lo))[:, 3 if own else 2]
        x = np.exp(lx)
        assert inside(4 * 16.0 * h**2 * x * (1 - x), span)
        assert inside(8 * 16.0 * h * x * (1 - x), slopes.h)
        assert inside(4 * 16.0 * h**2 * x * (1 - 2 * x), slopes.lq if own else slopes.lp)
        assert not (slopes.lp if own else slopes.lq).size().any()
        assert (value <= span.hi).all()


@each_setting
def test_slopes_of_the_row_weight(n, a, stretch) -> None:
    rng = np.random.default_rng(6)
    c = columns(n, a, stretch)
    # small and large Gamma, a point of it or an interval
    p0, g0 = 0.98 * rng.random(30), 10 ** rng.uniform(-3, np.log10(1 + a * a), 30)
    p = Range(p0, p0 + (0.999 - p0) * rng.random(30))
    gamma = Range(g0, g0 * (1 + 0.3 * rng.random(30) * (np.arange(30) % 2)))
    to_gamma, to_log_p = c.weight_slopes(p, gamma)

    def log_c(lp, g):
        x = mp.exp(lp)
        D = (1 + c.tau) * x + (1 + 1 / mp.mpf(c.tau)) * (1 - x) * g
        return mp.log((1 + c.eta) / (1 / (x * (1 + g)) + c.eta / D))

    for k in range(30):
        for s, t in ((0, 0), (0, 1), (1, 0), (1, 1), (0.5, 0.5)):
            x, g = p.lo[k] + s * (p.hi[k] - p.lo[k]), gamma.lo[k] + t * (gamma.hi[k] - gamma.lo[k])
            for axis, side in ((0, to_log_p), (1, to_gamma)):
                value = derivative(log_c, [float(np.log(x)), float(g)], axis)
                assert side.lo[k] - 1e-10 <= value <= side.hi[k] + 1e-10
            assert float(np.log(c.row_weight(x, g))) == pytest.approx(float(log_c(mp.log(x), mp.mpf(g))), abs=1e-10)


def test_a_gap_that_is_held_at_zero_has_no_slope():
    """A row opposite to the column: the middle of the box is no row, and chi made its bound .5 too small on the rows beside it."""
    c = Columns(8.0, 8.0, 1.0, 200, 2, (0.0, 2.0, 2.64), 2.0, 0.26, 3.01, 0.0, 20.0)
    m = Multipliers(*[np.array([x]) for x in (0.749, 0.375, 0.171, 5.17e-4, 0.102, 0.528, 0.102, 0.969)])
    lo, hi, at = (
        np.array(z)[:, None]
        for z in (
            (0.9990992807606285, 0.9999582451915702, -19.11382792451231, -0.05961931701999874),
            (1.0, 1.0, -16.019635389173086, -0.03437235030414783),
            (0.9996697874591061, 0.9999985764082585, -16.019635389173086, -0.0474002406223638),
        )
    )
    assert c.off(lo, hi, m)[0] >= c.off(at, at, m)[0]


@each_power
@each_setting
def test_slopes_of_the_split(n, a, stretch, power) -> None:
    rng = np.random.default_rng(9)
    c = columns(n, a, stretch, power)
    t0, g, t1 = c.split
    h0, share = rng.uniform(0.05, 0.95, 30), rng.random(30)
    h = Range(h0, h0 + (0.99 - h0) * 0.3 * rng.random(30))
    gamma = Range((a * h.lo) ** 2 * share, (a * h.lo) ** 2 * (share + (1 - share) * rng.random(30)))
    in_gamma, in_h = c.split_slopes(gamma, h)

    def split(y, value):
        return mp.log(1 + (t0 * (1 - y) ** g + t1) * (value / (a * y) ** 2) ** power)

    for k in range(30):
        for s, t in ((0, 0), (0, 1), (1, 0), (1, 1), (0.5, 0.5)):
            point = [h.lo[k] + s * (h.hi[k] - h.lo[k]), gamma.lo[k] + t * (gamma.hi[k] - gamma.lo[k])]
            for axis, side in ((0, in_h), (1, in_gamma)):
                value = derivative(split, [float(x) for x in point], axis)
                slack = 1e-10 * (1 + abs(value))
                assert side.lo[k] - slack <= value <= side.hi[k] + slack
    flat = c.variance(gamma.hi, h.lo)
    assert (flat <= 1).all()
    assert c.raised(flat) == pytest.approx(flat**power, rel=1e-12)


@each_chi
@each_power
@each_setting
def test_corner_and_middle_bound_the_term_at_every_point(n, a, stretch, power, chi) -> None:
    rng = np.random.default_rng(7)
    c = columns(n, a, stretch, power, chi)
    lo, hi, z = boxes(c, rng, 60)
    box, plane = c.box(lo, hi), c.plane(c.box(lo, hi))
    box, loss = with_losses(c, box, rng)
    middle, E = c.middle(lo, hi, box.loss), c.tilted(plane, box)
    reach = c.reach(plane, box, middle, E)
    gamma = c.gamma(reach, box)
    many = some_multipliers(rng, 60, c.omega, n)
    tilt = c.tilt(many, hi[0])
    _, h, lp, lq = z
    p, q = np.exp(lp), np.exp(lq)
    flat = a * h**2 + plane.e0 + plane.ep * (p - plane.pt) + plane.eq * (q - plane.qt)
    at = reach_of(c, (lo[0], hi[0]), h, p, q, flat) - loss
    # the term as the proof writes it, with the largest r of the box
    true = term(c, many, hi[0], h, p, q, loss / ((a * h) ** 2 * (1 - p)), np.maximum(at, 0.0))
    slopes = c.reach_slopes(box, E, plane)._replace(loss=Range.of(-np.ones(60)))
    there = c.reach_at(plane, middle) - middle.loss.lo
    bound, moves = c.by_middle(box, middle, tilt, there, gamma, slopes)
    corner = c.at_corner(box, c.thinned(gamma, box).hi, tilt)
    slack = 1e-9 * (1 + np.abs(true).max(axis=0))
    assert (true <= bound + slack).all()
    assert (true <= corner + slack).all()
    most = np.maximum(there, 0.0) / c.metric(middle.h).lo
    assert bound == pytest.approx(c.at_corner(middle, most, tilt) + moves.sum(axis=0), rel=1e-12)
