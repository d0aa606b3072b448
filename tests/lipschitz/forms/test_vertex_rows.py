"""A row on two tokens without its own: every bound of the vertices against climbs over the tokens, and forms that ran astray."""

import math

import numpy as np

import otattn as oa
from otattn.lipschitz.certificate import Statement
from otattn.lipschitz.constants.self_logit import SelfLogit, entropy_gap
from otattn.lipschitz.forms.frontier import Frontier
from otattn.lipschitz.forms.frontier_rows import Whole
from otattn.lipschitz.forms.own_pairs import OwnPairs
from otattn.lipschitz.forms.vertex_rows import choices
from otattn.measures import Ball


def unit(M):
    return M / np.linalg.norm(M, 2)


def norms(x):
    return np.linalg.norm(x, axis=1)


def into_ball(x):
    return x / np.maximum(1.0, norms(x))[:, None]


def climb(score, tokens, p, rng, rounds=50):
    """Random steps of many points at once, each kept where the score rises."""
    best, width = score(tokens, p), np.full(len(p), 0.5)
    for _ in range(rounds):
        new = [into_ball(x + width[:, None] * rng.standard_normal(x.shape)) for x in tokens]
        share = np.clip(p + 0.5 * width * rng.standard_normal(p.shape), 0.0, 1.0)
        found = score(new, share)
        up = found > best
        best, p = np.where(up, found, best), np.where(up, share, p)
        tokens = [np.where(up[:, None], y, x) for x, y in zip(tokens, new, strict=True)]
        width = np.clip(np.where(up, 1.3, 0.93) * width, 1e-5, 1.0)
    return float(best.max())


def some_heads():
    rng = np.random.default_rng(0)
    for k, (a, d) in enumerate([(0.3, 2), (7.0, 1), (9.0, 3), (30.0, 2), (60.0, 3)]):
        B = rng.standard_normal((d, d))
        form = (B, B, B - B.T, np.diag([1.0, -0.4][:d]), np.outer(B[0], B[-1]))[k]
        values = (np.eye(d), B.T, np.outer(B[0], B[1 % d]), B[:1], np.eye(d))[k]
        yield oa.SoftmaxAttention(a * unit(form), unit(values))


def test_vertices_hold_two_tokens_and_the_own_logit():
    """The exact value of a row on two tokens, with the payment that the three logits allow."""
    rng = np.random.default_rng(1)
    table, tight = choices(), {}
    for attention in some_heads():
        whole = Whole.of(Statement(attention, Ball(1.0), 5, 2.0))
        A, V, a = whole.A, whole.V, whole.a
        edges = np.linspace(0.0, 1.0, 25)
        cells = whole.cells(edges, SelfLogit.default(whole.head), Frontier.found(A, V))
        g0, g1 = cells.gamma
        for choice in rng.choice(len(table), 6, replace=False).tolist() + [0]:
            theta, r = float(rng.choice([0.02, 0.4, 0.8, 1.2, 1.55])), float(rng.choice([0.0, 0.0, 0.3, 0.7, 1.0]))
            e, s = math.sin(theta), math.cos(theta)
            at = np.full((1, g0.size), choice), np.full((1, g0.size), r)
            need, bound = (x[0] for x in cells.vertices(np.array([[e]]), np.array([[s]]), *at))

            def score(tokens, p, e=e, s=s, need=need, bound=bound, A=A, V=V, a=a, g0=g0, g1=g1):
                own, y, z = tokens
                q, g, d = 1.0 - p, own @ A.T, y - z
                gamma = norms(g)
                cell = np.clip(np.searchsorted(g1, gamma), 0, g1.size - 1)
                Vd = d @ V.T
                size = norms(Vd)
                w = (Vd / np.maximum(size, 1e-300)[:, None]) @ V
                turn = (a * p * q * size)[:, None] * g
                value = s * np.hypot(norms(p[:, None] * w + turn), norms(q[:, None] * w - turn))
                value += a * p * q * size * norms(d @ A) * e
                first, second, third = ((g * x).sum(axis=1) for x in (y, z, own))
                lead = np.maximum(np.maximum(first, second), third)
                paid = value + need[cell] * a * (p * first + q * second - lead)
                # a cell that begins at 0 takes no lambda that pays for directions along the gradient
                inside = (g0[cell] <= gamma) & (gamma <= g1[cell]) & (need[cell] < 100.0)
                return np.where(inside, paid / bound[cell], 0.0)

            tokens = [into_ball(2.0 * rng.standard_normal((400, len(A)))) for _ in range(3)]
            tokens[2][::2] = -tokens[1][::2]
            most = climb(score, tokens, rng.random(400), rng)
            assert most <= 1.0 + 1e-12
            kind = bool(table[choice, 0]), bool(table[choice, 1])
            tight[kind] = max(tight.get(kind, 0.0), most)
    assert len(tight) == 4
    assert min(tight.values()) > 0.8
    assert max(tight.values()) > 0.99


def test_the_mean_logit_is_near_the_largest_by_the_entropy_gap():
    """For every token in place of the own one; two values of the logits come as near as can be."""
    rng = np.random.default_rng(2)
    for n in (3, 4, 20):
        logits = np.exp(rng.uniform(-2.0, 3.0, (2000, 1))) * rng.standard_normal((2000, n))
        logits[::2, 1:] = logits[::2, 1:2]
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        lost = logits.max(axis=1) - (weights * logits).sum(axis=1)
        assert 0.99 * entropy_gap(n) < lost.max() <= entropy_gap(n) * (1.0 + 1e-12)


def test_the_search_for_own_pairs_does_not_run_away():
    """Here the best share of the two tokens goes beyond all bounds, and its exponential overflowed."""
    A = [[-108.06233225, 12.64501054], [12.64501054, -8.05071441]]
    V = [[-0.39816866, 0.22531739], [0.84164126, -0.29579957]]
    pairs = OwnPairs.found(unit(np.array(A)), unit(np.array(V)))
    assert np.isfinite(pairs.W).all()
    assert pairs.W.min() > 0.0
