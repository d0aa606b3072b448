"""Bounds of attention with composed logits: never below an attained slope, of the order in the radius that they claim."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from attention_maps import every_part

import otattn as oa
from otattn import bounds
from otattn.attention import Mask, PositionBias, Rotation, ScoreAttention
from otattn.attention.scores.kernel import ScoreKernel
from otattn.lipschitz.constants.scores import ScoreNumbers
from otattn.lipschitz.upper.scores import log_column_sum

Rng = np.random.Generator
ORDERS = (1.0, 1.5, 2.0, 3.0, math.inf)
THEOREMS = {
    "row": bounds.score_row_bound,
    "column": bounds.score_column_bound,
    "average": bounds.score_average_bound,
}


def head(rng: Rng, d: int, *, normalised: bool = False, positions: bool = True) -> ScoreAttention:
    """A head of random parts and sizes 1e-6 to 1e6; all parts of it normalised, or only some."""
    k, e = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    size = lambda: 10.0 ** (rng.uniform(-6, 6) if rng.random() < 0.25 else rng.uniform(-1, 1))  # noqa: E731
    Q, K, V = (size() * rng.normal(size=(rows, d)) for rows in (k, k, e))
    parts: dict = {}
    for name, width in (("query", k), ("key", k), ("value", e)):
        if rng.random() < 0.3:
            parts[f"{name}_bias"] = size() * rng.normal(size=width)
        if normalised or rng.random() < 0.4:
            eps, gain = 10.0 ** rng.uniform(-3, 1), size() * rng.normal(size=width)
            parts[f"{name}_norm"] = (
                oa.RMSNorm(gain, eps=eps)
                if rng.random() < 0.5 or width == 1
                else oa.LayerNorm(gain, rng.normal(size=width), eps=eps)
            )
    if rng.random() < 0.5:
        parts["cap"] = 10.0 ** rng.uniform(-1, 1)
    if positions:
        if k > 1 and rng.random() < 0.4:
            parts["rotation"] = Rotation(rng.uniform(0, 2, size=k // 2))
        if rng.random() < 0.4:
            parts["bias"] = PositionBias(rng.choice([0.0, 0.3, -1.0]), table=rng.normal(size=5))
        if rng.random() < 0.7:
            b, a = rng.integers(0, 4, size=2)
            parts["mask"] = (
                Mask(),
                Mask(before=float(b)),
                Mask(False, before=float(b), after=float(a)),
                Mask(False, allowed=rng.random((8, 8)) < 0.4 + np.eye(8)),
            )[int(rng.integers(4))]
    if rng.random() < 0.4:
        parts["sink"] = float(rng.normal() * 3.0)
        if not positions or rng.random() < 0.3:
            parts["length"] = float(rng.uniform(0.5, 7.0))
            if parts.get("mask") is not None and parts["mask"].allowed is not None:
                parts.pop("mask")
    return ScoreAttention(Q, K, V, scale=float(rng.choice([-1.0, 1.0]) * size()), **parts)


def slope(attention: oa.AttentionMap, mu: object, p: float, rng: Rng) -> float:
    """A value that the derivative attains on L^p(mu): some steps of the power method between dual norms."""
    J = attention.jacobian(mu)  # type: ignore[arg-type]
    w = attention.as_measure(mu).weights  # type: ignore[arg-type]
    best = 0.0

    def size(v: np.ndarray) -> float:
        lengths = np.linalg.norm(v, axis=1)
        return float(lengths.max()) if math.isinf(p) else float((w @ lengths**p) ** (1.0 / p))

    def dual(v: np.ndarray, order: float) -> np.ndarray:
        lengths = np.linalg.norm(v, axis=1, keepdims=True)
        return v / np.maximum(lengths, 1e-300) * (lengths / max(lengths.max(), 1e-300)) ** (order - 1.0)

    for start in range(3):
        v = rng.normal(size=(J.n, J.d))
        if start:
            v[rng.permutation(J.n)[1:]] = 0.0
        for _ in range(6):
            Jv = J.jvp(v)
            if size(v) > 0.0:
                best = max(best, size(Jv) / size(v))
            if p == 1.0:  # one token moves, in the direction of the largest sum
                back = J.vjp(w[:, None] * dual(Jv, 1.0)) / w[:, None]
                v = np.zeros_like(v)
                j = int(np.linalg.norm(back, axis=1).argmax())
                v[j] = back[j]
            elif math.isinf(p):  # one row, all tokens move
                g = np.zeros_like(Jv)
                i = int(np.linalg.norm(Jv, axis=1).argmax())
                g[i] = Jv[i]
                v = dual(J.vjp(g), 1.0)
            else:
                v = dual(J.vjp(w[:, None] * dual(Jv, p)) / w[:, None], p / (p - 1.0))
            if not np.isfinite(v).all() or not v.any():
                break
    return best


def climb(attention: oa.AttentionMap, d: int, n: int, radius: float, p: float, rng: Rng, weighted: bool) -> float:
    """The largest slope found in the ball, from starts that are extreme in one way or another."""
    w = rng.dirichlet(np.full(n, 0.5)) + 1e-3 if weighted else np.full(n, 1.0 / n)

    def at(X: np.ndarray) -> float:
        X = X * np.minimum(1.0, radius * (1 - 1e-12) / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-300))
        if attention.causal:
            mu: object = oa.SpaceTimeMeasure(np.arange(1, n + 1) / n, X, w / w.sum()) if weighted else X
        else:
            mu = oa.DiscreteMeasure(X, w / w.sum()) if weighted else X
        try:
            return slope(attention, mu, p, rng)
        except OverflowError:
            return 0.0

    best, X = 0.0, np.zeros((n, d))
    u = rng.normal(size=d)
    u *= radius / np.linalg.norm(u)
    for trial in range(12):
        Y = rng.choice([-1.0, 0.0, 1.0], size=(n, 1)) * u if trial < 4 else radius * rng.normal(size=(n, d))
        Y = Y * 10.0 ** rng.uniform(-8, 0, size=(n, 1)) if trial % 3 == 2 else Y
        if (value := at(Y)) > best:
            best, X = value, Y
    step = 1.0
    for _ in range(25):
        Y = X + step * radius * rng.normal(size=X.shape) * (rng.random((n, 1)) < 0.5)
        if (value := at(Y)) > best:
            best, X = value, Y
        else:
            step *= 0.8
    return best


def attacked(seed: int, theorem: str) -> None:
    rng = np.random.default_rng([seed, sorted(THEOREMS).index(theorem)])
    d, n = int(rng.integers(1, 4)), int(rng.choice([1, 2, 2, 3, 3, 5]))
    everywhere = bool(rng.random() < 0.3)
    ours = head(rng, d, normalised=everywhere, positions=theorem == "average" or bool(rng.random() < 0.7))
    if theorem == "average":
        object.__setattr__(ours, "mask", Mask())
    p = 2.0 if theorem == "row" else float(rng.choice(ORDERS[1:4] if theorem == "average" else ORDERS))
    radius = 10.0 ** rng.uniform(-2, 3)
    region = {} if everywhere else {"radius": radius}
    free = theorem != "row" and bool(rng.random() < 0.5)
    record = oa.lipschitz.theorem.THEOREMS[f"score_{theorem}_bound"]
    if record.reason(ours, None if everywhere else oa.Ball(radius), None if free else n, p) is not None:
        free = False
    bound = THEOREMS[theorem](ours, n=None if free else n, p=p, **region)
    assert climb(ours, d, n, radius, p, rng, free) <= bound.value * (1 + 1e-9), (ours, bound)


def attacked_whole(seed: int, kind: str) -> None:
    """Gates, and sums of heads, some of them rotary."""
    rng = np.random.default_rng([seed, 99])
    d, n = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5]))
    radius, p = 10.0 ** rng.uniform(-2, 2), float(rng.choice(ORDERS))
    parts: list[oa.AttentionMap] = [head(rng, d) for _ in range(int(rng.integers(1, 4)))]
    placed = [part for part in parts if part.causal == parts[0].causal]
    if kind == "gated":
        e = int(parts[0].out_dim or 1)
        rows = 1 if rng.random() < 0.5 else e
        gate, shift = 10.0 ** rng.uniform(-2, 2) * rng.normal(size=(rows, d)), 5.0 * rng.normal(size=rows)
        whole: oa.AttentionMap = oa.GatedAttention(parts[0], gate, shift if rng.random() < 0.5 else None)
        bound = bounds.gated_bound(whole, radius=radius, n=n, p=p)
    else:
        outputs = [10.0 ** rng.uniform(-1, 1) * rng.normal(size=(2, int(part.out_dim or 1))) for part in placed]
        whole = oa.MultiHeadAttention(placed, outputs)
        bound = bounds.heads_bound(whole, radius=radius, n=n, p=p)
    assert climb(whole, d, n, radius, p, rng, False) <= bound.value * (1 + 1e-9), (whole, bound)


@pytest.mark.parametrize("kind", ["gated", "heads"])
def test_gates_and_sums_are_never_violated(kind: str) -> None:
    for seed in range(2):
        attacked_whole(seed, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated", "heads"])
def test_gates_and_sums_are_never_violated_long(kind: str) -> None:
    for seed in range(1000, 1025):
        attacked_whole(seed, kind)


@pytest.mark.parametrize("theorem", THEOREMS)
def test_never_violated(theorem: str) -> None:
    for seed in range(3):
        attacked(seed, theorem)


@pytest.mark.slow
@pytest.mark.parametrize("theorem", THEOREMS)
def test_never_violated_long(theorem: str) -> None:
    for seed in range(1000, 1030):
        attacked(seed, theorem)


# --- what the numbers are, and how they grow


def test_the_numbers_are_never_below_samples() -> None:
    for seed in range(30):
        rng = np.random.default_rng([77, seed])
        d = int(rng.integers(1, 4))
        ours = head(rng, d)
        ours = replace_parts(ours, sink=None, cap=None, mask=None)
        radius = 10.0 ** rng.uniform(-2, 2)
        region = oa.Ellipsoid(radius * rng.normal(size=(d, d)), rng.normal(size=d))
        x = ScoreNumbers(ours, region)
        X = np.vstack([region.sample(200, rng), region.center])
        norm = lambda part, z: z if part is None else part._map(z)  # noqa: E731
        biased = lambda W, b, X: X @ W.T + (0.0 if b is None else b)  # noqa: E731
        values = norm(ours.value_norm, biased(ours.V, ours.value_bias, X))
        q = norm(ours.query_norm, biased(ours.Q, ours.query_bias, X))
        k = norm(ours.key_norm, biased(ours.K, ours.key_bias, X))
        room = 1 + 1e-9
        assert np.linalg.norm(values, axis=1).max() <= x.reach * room
        u = rng.normal(size=values.shape[1])
        assert np.ptp(values @ u) <= 2.0 * x.spread * np.linalg.norm(u) * room
        logits = ours.scale * q @ k.T
        assert np.ptp(logits, axis=1).max() <= x.logit_range(1) * room
        steps = np.linalg.norm(np.diff(X, axis=0), axis=1)
        assert (np.linalg.norm(np.diff(values, axis=0), axis=1) <= x.v * steps * room + 1e-300).all()
        # turning both by any angle keeps the norms, so the gradients are bounded for every offset
        assert (np.abs(np.diff(logits, axis=1)) <= x.G * steps * room + 1e-12 * np.abs(logits).max()).all()
        assert (np.abs(np.diff(logits, axis=0)) <= x.H * steps[:, None] * room + 1e-12 * np.abs(logits).max()).all()


def replace_parts(attention: ScoreAttention, **parts: object) -> ScoreAttention:
    names = set(attention.__dataclass_fields__) - {"Q", "K", "V"}
    given = {name: getattr(attention, name) for name in names} | parts
    return ScoreAttention(attention.Q, attention.K, attention.V, **given)


def test_numbers_of_one_dimension_by_hand() -> None:
    """``x -> 3 x + 1`` on ``[-2, 2]``, queries 2 x, keys -x / sqrt(x^2 + 0.25), a sink."""
    norm = oa.RMSNorm([1.0], eps=0.25)
    ours = ScoreAttention([[2.0]], [[-1.0]], [[3.0]], value_bias=[1.0], key_norm=norm, sink=0.0, length=1.0, scale=0.5)
    x = ScoreNumbers(ours, oa.Ball(2.0, 1))
    assert x.v == pytest.approx(3.0, rel=1e-11)
    assert x.reach == pytest.approx(7.0, rel=1e-11)
    assert x.spread == pytest.approx(6.0, rel=1e-11)  # values in [-5, 7], the sink's 0 among them
    assert pytest.approx(0.5 * 4.0 * 2.0, rel=1e-11) == x.G
    assert pytest.approx(0.5 * 2.0 * 2.0 / math.sqrt(4.25), rel=1e-11) == x.H
    assert x.logit_range(None) == pytest.approx(2.0 * 0.5 * 4.0 * 2.0 / math.sqrt(4.25), rel=1e-11)
    far = ScoreNumbers(replace_parts(ours, value_bias=[50.0]), oa.Ball(2.0, 1))
    assert far.spread == pytest.approx(28.0, rel=1e-11)  # values in [44, 56], and 0
    capped = ScoreNumbers(replace_parts(ours, cap=0.3), oa.Ball(2.0, 1))
    assert capped.logit_range(None) == pytest.approx(0.6, rel=1e-11)
    biased = replace_parts(ours, cap=0.3, bias=PositionBias(0.1, table=[5.0, 2.0, 0.0, 0.0, 9.0]), mask=Mask(before=1))
    # one step back: the table's 2 and 0, and the slope
    assert ScoreNumbers(biased, oa.Ball(2.0, 1)).logit_range(None) <= 0.6 + 2.0 + 0.11
    assert ScoreNumbers(biased, oa.Ball(2.0, 1)).logit_range(7) >= 0.6 + 2.0 + 0.1


@pytest.mark.parametrize(
    ("p", "factor"), [(1.0, 2.0), (4.0 / 3.0, math.sqrt(2.0)), (2.0, 1.0), (5.0, 1.0), (math.inf, 1.0)]
)
def test_formulas_by_hand(p: float, factor: float) -> None:
    """Logits x y, values y on [-R, R]: v = 1, t = sigma = R^2; two tokens of logits at most 2 R^2 apart."""
    R = 0.6
    ours = ScoreAttention([[1.0]], [[1.0]], [[1.0]])
    column = bounds.score_column_bound(ours, radius=R, n=2, p=p).value
    sums = 2.0 / (1.0 + math.exp(-2.0 * R**2))
    assert column == pytest.approx(R**2 + sums ** (1.0 / p) * (1.0 + factor * R**2), rel=1e-10)
    free = bounds.score_column_bound(ours, radius=R, p=p).value
    assert free == pytest.approx(R**2 + math.exp(2.0 * R**2 / p) * (1.0 + factor * R**2), rel=1e-10)
    row = bounds.score_row_bound(ours, radius=R, n=2)
    phi = max(1.0, (1.0 + R**2) / math.sqrt(2.0))
    alpha = 2.0 * phi**2 + 2.0 * math.sqrt(2.0) * phi * R**2
    assert row.value == pytest.approx(math.sqrt(R**4 + alpha), rel=1e-10)


def test_normalised_queries_keys_and_values_have_a_constant_on_all_of_space() -> None:
    rng = np.random.default_rng(1)
    ours = replace_parts(head(rng, 3, normalised=True, positions=False), sink=None, cap=None)
    whole = bounds.score_row_bound(ours, n=4)
    assert whole.domain is None
    assert math.isfinite(whole.value)
    assert whole.verify()
    balls = [bounds.score_row_bound(ours, radius=R, n=4).value for R in (0.1, 1.0, 10.0, 1e3, 1e6)]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(balls))
    assert balls[-1] <= whole.value * (1 + 1e-9)
    assert balls[-1] == pytest.approx(whole.value, rel=1e-6)
    for p in ORDERS:
        assert math.isfinite(bounds.score_column_bound(ours, p=p).value)
    # a bound on all of space is one on every domain
    assert whole.verify(domain=oa.Ball(5.0))
    rows = {row["theorem"] for row in oa.theorems(ours, n=4).rows() if row["applies"]}
    assert rows == {"score_row_bound", "score_column_bound"}


NORM = oa.RMSNorm([1.0], eps=0.5)
KINDS = {
    # what is given, and the order in R of bound and constant
    "norm": ({"query_norm": NORM, "key_norm": NORM}, 1.0),
    "cap": ({"cap": 1.0}, 2.0),
    "values too": ({"query_norm": NORM, "key_norm": NORM, "value_norm": NORM}, 0.0),
}


@pytest.mark.parametrize("name", KINDS)
def test_growth_in_the_radius_is_that_of_the_constant(name: str) -> None:
    """Tokens -R, 0, R: the weight of the one in the middle moves while the others are averaged."""
    parts, order = KINDS[name]
    ours = ScoreAttention([[1.0]], [[1.0]], [[1.0]], **parts)
    sizes = (1e3, 1e5)
    above = [bounds.score_column_bound(ours, radius=R).value for R in sizes]
    assert math.log(above[1] / above[0]) / math.log(100.0) == pytest.approx(order, abs=1e-2)
    below = [oa.local_lipschitz(ours, [[-R], [0.0], [R]]).value for R in sizes]
    if order:
        assert math.log(below[1] / below[0]) / math.log(100.0) == pytest.approx(order, abs=1e-2)
    assert all(a <= b for a, b in zip(below, above, strict=True))


def test_windows_make_bounds_free_of_the_number_of_tokens() -> None:
    for mask in (Mask(before=3), Mask(False, before=2, after=1)):
        ours = ScoreAttention(np.eye(2), np.eye(2), np.eye(2), mask=mask, rotation=Rotation([1.0]))
        for function, p in (
            (bounds.score_row_bound, 2),
            (bounds.score_column_bound, 2),
            (bounds.score_column_bound, 1),
        ):
            few, many = (function(ours, radius=1.0, n=n, p=p).value for n in (10**3, 10**6))
            assert many == pytest.approx(few, rel=1e-12)
            wide = function(replace_parts(ours, mask=Mask(mask.causal)), radius=1.0, n=10**6, p=p).value
            assert wide > 1.1 * few


def test_column_sums_are_never_below_attained_ones() -> None:
    rng = np.random.default_rng(4)
    masks = (None, Mask(), Mask(before=1), Mask(False, before=1, after=2), Mask(False, before=0, after=3))
    masks += (
        Mask(False, allowed=rng.random((8, 8)) < 0.4 + np.eye(8)),
        Mask(before=2, allowed=np.ones((9, 9), dtype=bool)),
    )
    closest = 0.0
    for trial in range(150):
        ours = ScoreAttention(
            [[1.0]], [[1.0]], [[1.0]], scale=3.0, cap=10.0 ** rng.uniform(-1, 0.5), mask=masks[trial % 7]
        )
        n = int(rng.integers(1, 9))
        X = rng.choice([-1.0, 0.0, 1.0], size=(n, 1)) * 10.0
        mu = ours.as_measure(X)
        kernel = ScoreKernel(ours, mu, None)
        rows = kernel.rows_of(kernel.queries(mu.points, kernel.places), kernel.places, slice(0, n))
        found = rows.P.sum(axis=0).max()
        bound = math.exp(log_column_sum(ScoreNumbers(ours, oa.Ball(10.0)), n))
        assert found <= bound * (1 + 1e-9)
        closest = max(closest, found / bound if n > 2 else 0.0)
    assert closest > 0.8


@pytest.mark.parametrize(
    ("parts", "arguments", "message"),
    [
        (
            {"key_norm": oa.RMSNorm([1.0, 1.0])},
            {"radius": 1.0, "n": 2},
            "key_norm must be .* with eps > 0.*received eps = 0",
        ),
        ({}, {"n": 2}, "must be normalised, received no query_norm, key_norm, value_norm"),
        ({}, {"radius": 1.0}, "n, a number of tokens, must be given"),
        ({}, {"radius": 1.0, "n": 2, "p": 1}, "p must be 2"),
    ],
)
def test_what_does_not_apply_says_why(parts: dict, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bounds.score_row_bound(ScoreAttention(np.eye(2), np.eye(2), np.eye(2), **parts), **arguments)


def test_what_says_nothing_of_any_measure_says_why() -> None:
    eye = np.eye(2)
    for parts, message in (
        ({"mask": Mask()}, "under a mask the column sums of any measure are not bounded"),
        ({"bias": PositionBias(0.1)}, "a slope over positions without end"),
    ):
        ours = ScoreAttention(eye, eye, eye, **parts)
        with pytest.raises(ValueError, match=message):
            bounds.score_column_bound(ours, radius=1.0)
        assert math.isfinite(bounds.score_column_bound(ours, radius=1.0, p=math.inf).value)
    for ours, p, message in (
        (ScoreAttention(eye, eye, eye), 2, "causal, without a window"),
        (ScoreAttention(eye, eye, eye, mask=Mask(before=2)), 2, "causal, without a window"),
        (ScoreAttention(eye, eye, eye, mask=Mask()), 1, r"p must lie in \(1, inf\)"),
        (ScoreAttention(eye, eye, eye, mask=Mask(), bias=PositionBias(0.1)), 2, "a slope over positions"),
    ):
        with pytest.raises(ValueError, match=message):
            bounds.score_average_bound(ours, radius=1.0, p=p)
    with pytest.raises(ValueError, match="attention must be ScoreAttention, received SoftmaxAttention"):
        bounds.score_row_bound(oa.SoftmaxAttention(eye, eye), radius=1.0, n=2)


def test_gates_and_sums_say_why_not() -> None:
    eye = np.eye(2)
    for call, message in (
        (lambda: bounds.gated_bound(oa.SoftmaxAttention(eye, eye), radius=1.0, n=2), "must be GatedAttention"),
        (
            lambda: bounds.gated_bound(
                oa.GatedAttention(oa.FunctionAttention(lambda x, mu: x, 2), eye), radius=1.0, n=2
            ),
            "no theorem of ours bounds FunctionAttention",
        ),
        (
            lambda: bounds.gated_bound(oa.GatedAttention(oa.LinearAttention(eye, eye), eye), radius=1.0, n=2),
            "values of LinearAttention have no bound",
        ),
        (
            lambda: bounds.heads_bound(oa.MultiHeadAttention([oa.SoftmaxAttention(eye, eye)]), radius=1.0, n=2),
            "have multi_head, which is sharper",
        ),
        (lambda: bounds.heads_bound(oa.SoftmaxAttention(eye, eye), radius=1.0, n=2), "must be MultiHeadAttention"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_gate_that_is_nearly_shut_makes_the_bound_small() -> None:
    """Values x, gate sigmoid(-20 + x / 100) on [-1, 1]: about e^-20 for the values, and 1/4 of 1/100 for the gate's slope."""
    shut = oa.GatedAttention(oa.SoftmaxAttention([[0.0]], [[1.0]]), [[0.01]], [-20.0])
    bound = bounds.gated_bound(shut, radius=1.0, n=1).value
    assert bound == pytest.approx(math.exp(-20.0 + 0.01) + 0.25 * 0.01, rel=1e-6)


def test_a_bound_is_kept_in_a_file_and_proved_again(tmp_path: object) -> None:
    ours = every_part(np.random.default_rng(0))
    bound = oa.lipschitz_upper_bound(ours, radius=2.0, n=4)
    bound.save(tmp_path / "bound.npz")  # type: ignore[operator]
    again = type(bound).load(tmp_path / "bound.npz")  # type: ignore[operator]
    assert again.verify(ours)
    assert not replace(again, value=again.value * (1 - 1e-6)).verify(ours)
    assert not again.verify(replace_parts(ours, cap=0.7))
    assert not again.verify(replace_parts(ours, sink=0.9))
    assert not again.verify(replace_parts(ours, mask=Mask()))
    assert not again.verify(replace_parts(ours, rotation=None))
