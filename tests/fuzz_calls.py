"""Random calls of every public function with good, odd and wrong arguments: what a fuzzer draws from."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

import otattn as oa

ALLOWED = (ValueError, TypeError, OverflowError, oa.OtattnError)
"""What a wrong argument may raise; MemoryBudgetError and the like are OtattnErrors."""


class Hang(Exception):
    """A call took longer than its limit."""


@contextmanager
def limited(seconds: int):
    def ring(*_: Any) -> None:
        raise Hang(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Draw:
    """Arguments from a random generator: usually good, sometimes extreme, sometimes nonsense."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.n = int(rng.integers(1, 6))
        self.d = int(rng.integers(1, 4))
        self.badness = float(rng.choice([0.0, 0.05, 0.2]))

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def spoiled(self, value: Any) -> Any:
        """Now and then something else in its place."""
        if self.rng.random() >= self.badness:
            return value
        nonsense = (
            None,
            "x",
            np.nan,
            np.inf,
            -1,
            0,
            1e308,
            [],
            {},
            object(),
            np.array(["a"]),
            1j,
            [[1], [1, 2]],
            b"",
            True,
        )
        if isinstance(value, np.ndarray) and value.size and self.rng.random() < 0.7:
            kind = int(self.rng.integers(9))
            out = value.astype(float).copy()
            if kind == 0:
                out.flat[int(self.rng.integers(out.size))] = self.pick((np.nan, np.inf, -np.inf))
            elif kind == 1:
                return out[..., None]
            elif kind == 2:
                return out[:0]
            elif kind == 3:
                return out * self.pick((1e-320, 1e-200, 1e150, 1e300))
            elif kind == 4:
                return np.concatenate([out, out], axis=-1)
            elif kind == 5:
                return out.astype(self.pick((np.float16, np.float32, np.int8, complex, object)))
            elif kind == 6:
                return np.zeros_like(out)
            elif kind == 7:
                return out.tolist()
            else:
                return -out
            return out
        return self.pick(nonsense)

    # good values, spoiled

    def array(self, *shape: int) -> Any:
        scale = float(self.pick((1.0, 1.0, 1.0, 1e-8, 30.0)))
        X = scale * self.rng.standard_normal(shape)
        if self.rng.random() < 0.2 and X.ndim > 1 and len(X) > 1:
            X[-1] = X[0]
        return self.spoiled(X)

    def matrix(self) -> Any:
        kind = int(self.rng.integers(5))
        M = self.rng.standard_normal((self.d, self.d))
        M = (M, np.eye(self.d), -np.eye(self.d), M + M.T, M @ M.T)[kind]
        return self.spoiled(float(self.pick((1.0, 1.0, 0.0, 1e-6, 20.0))) * M)

    def symmetric(self) -> Any:
        M = self.rng.standard_normal((self.d, self.d))
        if self.rng.random() < 0.3:
            M[:, 0] = 0.0
        return self.spoiled(M @ M.T)

    def points(self) -> Any:
        return self.array(self.n, self.d)

    def weights(self) -> Any:
        w = self.rng.dirichlet(np.ones(self.n))
        if self.rng.random() < 0.2 and self.n > 1:
            w[0] = 0.0
            w /= w.sum()
        return self.spoiled(self.pick((w, np.full(self.n, 1.0 / self.n))))

    def number(self, *options: Any) -> Any:
        return self.spoiled(self.pick(options))

    def order(self) -> Any:
        return self.number(1, 2, 2, 2, np.inf, 1.5, 3)

    def seed(self) -> Any:
        return self.spoiled(int(self.rng.integers(100)))

    def discrete(self) -> Any:
        if self.rng.random() < 0.5:
            return self.points()
        return oa.DiscreteMeasure(self.points(), self.weights())

    def sequence(self) -> Any:
        return oa.SpaceTimeMeasure.from_sequence(self.points())

    def gaussian(self) -> Any:
        return oa.GaussianMeasure(self.array(self.d), self.symmetric())

    def measure(self) -> Any:
        return self.pick((self.discrete, self.discrete, self.sequence, self.gaussian))()

    def attention(self) -> Any:
        kind = int(self.rng.integers(11))
        A, V = self.matrix(), self.matrix()
        if kind < 4:
            return oa.SoftmaxAttention(A, V, bias=self.array(self.d) if self.rng.random() < 0.2 else None)
        if kind == 4:
            return oa.L2Attention(self.matrix(), self.matrix(), V)
        if kind == 5:
            return oa.SinkhornAttention(A, V)
        if kind == 6:
            return self.pick((oa.SigmoidAttention, oa.ReLUAttention, oa.LinearAttention, oa.ExponentialAttention))(A, V)
        if kind == 7:
            return oa.MaskedAttention(oa.SoftmaxAttention(A, V))
        if kind == 8:
            return oa.MultiHeadAttention([oa.SoftmaxAttention(A, V), oa.SoftmaxAttention(V, A)])
        if kind == 9:
            Q, K = self.array(2, self.d), self.array(2, self.d)
            return oa.RotaryAttention(
                Q, K, V, base=self.number(10.0, 1e4), masked=self.spoiled(bool(self.rng.integers(2)))
            )
        factors = [self.array(2, self.d) for _ in range(3)]
        return oa.SoftmaxAttention.from_qkv(*factors)

    def softmax(self) -> Any:
        return oa.SoftmaxAttention(self.matrix(), self.matrix())

    def domain(self) -> Any:
        kind = int(self.rng.integers(5))
        if kind == 0:
            return oa.Ellipsoid(self.array(self.d, self.d), self.array(self.d))
        if kind == 1:
            low = self.rng.standard_normal(self.d)
            return oa.Box(self.spoiled(low), self.spoiled(low + self.rng.random(self.d)))
        if kind == 2:
            return oa.PointSet(self.points())
        if kind == 3:
            return oa.LayerNormDomain(self.array(self.d), self.array(self.d))
        return oa.Ball(self.number(1.0, 0.3, 5.0), self.d)


def _calls(g: Draw) -> dict[str, tuple[float, Callable[[], Any]]]:
    """Every public function: a weight (slow ones are rare) and a call."""
    p, mu, nu = g.order, g.measure, g.measure
    size = {"radius": lambda: g.number(1.0, 0.5, 3.0), "n": lambda: g.number(1, 2, 3, 8, None)}
    count = lambda: g.number(2, 3, 5)  # noqa: E731
    return {
        "DiscreteMeasure": (2, lambda: oa.DiscreteMeasure(g.points(), g.weights()).covariance()),
        "DiscreteMeasure.normalized": (
            1,
            lambda: oa.DiscreteMeasure.normalized(g.points(), g.weights()).merge_duplicates(),
        ),
        "GaussianMeasure": (1, lambda: g.gaussian().sample(g.number(1, 4), g.seed())),
        "SpaceTimeMeasure": (1, lambda: oa.SpaceTimeMeasure(g.spoiled(g.rng.random(g.n)), g.points(), g.weights())),
        "domains": (2, lambda: g.domain().project(g.points())),
        "wasserstein": (3, lambda: oa.wasserstein(g.discrete(), g.discrete(), p=p())),
        "wasserstein_batch": (2, lambda: oa.wasserstein_batch(g.array(3, g.n, g.d), g.array(3, g.n, g.d), p=p())),
        "transport": (2, lambda: oa.transport(g.discrete(), g.discrete(), p=p()).gap),
        "transport_from_cost": (1, lambda: oa.transport_from_cost(g.weights(), g.weights(), g.array(g.n, g.n))),
        "conditional_wasserstein": (
            2,
            lambda: oa.conditional_wasserstein(g.sequence(), g.sequence(), p=p(), time_tol=g.number(1e-12, 0.0, 0.1)),
        ),
        "conditional_transport": (1, lambda: oa.conditional_transport(g.sequence(), g.sequence(), p=p())),
        "bures_wasserstein": (2, lambda: oa.bures_wasserstein(g.gaussian(), g.gaussian())),
        "covariance_distance": (2, lambda: oa.covariance_distance(g.symmetric(), g.symmetric())),
        "bures_geodesic": (1, lambda: oa.bures_geodesic(g.gaussian(), g.gaussian(), g.number(0.0, 0.5, 1.0))),
        "gaussian_transport_map": (1, lambda: oa.gaussian_transport_map(g.gaussian(), g.gaussian())),
        "attention": (3, lambda: g.attention()(g.points(), g.discrete())),
        "pushforward": (3, lambda: g.attention().pushforward(mu())),
        "jacobian": (2, lambda: g.attention().jacobian(mu()).to_dense()),
        "field_jacobian": (2, lambda: g.attention().field_jacobian(g.points(), g.discrete())),
        "LayerNorm": (
            1,
            lambda: oa.LayerNorm(g.array(g.d), g.array(g.d), eps=g.number(0.0, 1e-5)).pushforward(g.discrete()),
        ),
        "RMSNorm": (1, lambda: oa.RMSNorm(g.array(g.d), eps=g.number(0.0, 1e-5)).pushforward(g.discrete())),
        "MLP": (1, lambda: oa.MLP(g.array(3, g.d), g.array(3), g.array(g.d, 3)).pushforward(g.discrete())),
        "Residual": (1, lambda: oa.Residual(g.attention()).pushforward(g.discrete())),
        "Compose": (1, lambda: oa.Compose(g.attention(), g.attention()).pushforward(g.discrete())),
        "stability_ratio": (3, lambda: oa.stability_ratio(g.attention(), mu(), nu(), p=p()).value),
        "stability_study": (
            0.3,
            lambda: oa.stability_study(
                g.attention(),
                oa.samplers.uniform_ball_pairs(count(), g.d, size["radius"]()),
                n_pairs=g.number(1, 3),
                p=p(),
                rng=g.seed(),
                progress=False,
            ),
        ),
        "sweep": (0.2, lambda: oa.sweep(g.attention(), n=count(), n_pairs=g.number(1, 2), p=p(), progress=False)),
        "local_lipschitz": (2, lambda: oa.local_lipschitz(g.attention(), mu(), p=p()).value),
        "local_lipschitz_batch": (
            0.5,
            lambda: [a.value for a in oa.local_lipschitz_batch(g.attention(), g.spoiled([mu(), nu()]), p=p())],
        ),
        "at_measure_bound": (1, lambda: oa.at_measure_bound(g.attention(), mu()).value),
        "local_growth": (
            0.5,
            lambda: oa.local_growth([g.softmax()], g.array(2, 8, g.d), n_values=g.spoiled((2, 4, 8))).values,
        ),
        "adversarial_tokens": (
            0.1,
            lambda: oa.adversarial_tokens(
                g.softmax(),
                n=count(),
                radius=size["radius"](),
                method=g.number("castin-antipodal", "castin-half", "two-anchor"),
            ),
        ),
        "lipschitz_upper_bound": (
            0.1,
            lambda: oa.lipschitz_upper_bound(g.softmax(), radius=size["radius"](), n=size["n"](), p=p()).value,
        ),
        "lipschitz_lower_bound": (
            0.02,
            lambda: (
                oa.lipschitz_lower_bound(
                    g.attention(), radius=size["radius"](), n=size["n"](), p=p(), rng=g.seed()
                ).value
            ),
        ),
        "bounds.table": (2, lambda: oa.bounds.table(g.attention(), domain=g.domain(), n=size["n"](), p=p())),
        "bounds.castin2024_discrete": (
            1,
            lambda: oa.bounds.castin2024_discrete(g.attention(), radius=size["radius"](), n=count()).value,
        ),
        "bounds.crossover": (0.3, lambda: oa.bounds.crossover(g.attention(), size["radius"]()).ours),
        "relaxations.field_certificate": (
            0.5,
            lambda: oa.relaxations.field_certificate(g.attention(), domain=g.domain()).value,
        ),
        "relaxations.column_exponent": (
            0.3,
            lambda: oa.relaxations.column_exponent(g.attention(), domain=g.domain()).value,
        ),
        "relaxations.near_tokens": (
            0.5,
            lambda: oa.relaxations.near_tokens(g.attention(), g.points(), g.number(0.01, 0.1, 0.0)).value,
        ),
        "certify": (
            0.3,
            lambda: (
                oa.certify(
                    g.attention(),
                    g.points(),
                    radius=g.number(0.01, 1e-4, 0.0),
                    p=p(),
                    kind=g.pick(("pairs", "constant", "all")),
                ).value
            ),
        ),
        "certified_radius": (
            0.1,
            lambda: oa.certified_radius(g.attention(), g.points(), factor=g.number(2.0, 1.1)).value,
        ),
        "relaxations.mean_field": (
            0.05,
            lambda: oa.relaxations.mean_field(g.softmax(), radius=size["radius"](), p=p()).value,
        ),
        "relaxations.rows_and_columns": (
            0.02,
            lambda: oa.relaxations.rows_and_columns(g.softmax(), radius=size["radius"](), n=count()).value,
        ),
        "check_gradient_flow": (0.3, lambda: oa.check_gradient_flow(g.attention(), mu(), rng=g.seed()).verdict),
        "energy_dissipation": (0.2, lambda: oa.energy_dissipation(g.attention(), g.discrete()).defect),
        "displacement_convexity": (
            0.3,
            lambda: oa.displacement_convexity(oa.energies.LinearEnergy(g.matrix()), g.discrete(), g.discrete()).least,
        ),
        "energies": (
            1,
            lambda: g.pick((oa.energies.ExponentialEnergy, oa.energies.LinearEnergy, oa.energies.SigmoidEnergy))(
                g.symmetric()
            )(g.discrete()),
        ),
        "bures_closedness": (0.5, lambda: oa.bures_closedness(g.attention(), g.symmetric(), rng=g.seed()).value),
        "relaxations.psd": (
            0.02,
            lambda: oa.relaxations.psd(g.softmax(), radius=size["radius"](), n=count(), effort=g.number("fast")).value,
        ),
        "relaxations.psd_mean_field": (
            0.02,
            lambda: oa.relaxations.psd_mean_field(g.softmax(), radius=size["radius"](), effort=g.number("fast")).value,
        ),
        "relaxations.logit_gap": (
            0.02,
            lambda: oa.relaxations.logit_gap(g.softmax(), radius=size["radius"](), effort=g.number("fast")).value,
        ),
        "relaxations.sinkhorn_symmetric": (
            0.02,
            lambda: (
                oa.relaxations.sinkhorn_symmetric(
                    oa.SinkhornAttention(g.symmetric(), g.matrix()), radius=size["radius"](), n=size["n"]()
                ).value
            ),
        ),
        "relaxations.negative_identity": (
            0.02,
            lambda: (
                oa.relaxations.negative_identity(
                    g.softmax(), radius=size["radius"](), n=count(), effort=g.number("fast")
                ).value
            ),
        ),
        "relaxations.frontier_rows": (
            0.02,
            lambda: (
                oa.relaxations.frontier_rows(
                    g.softmax(), radius=size["radius"](), n=count(), effort=g.number("fast")
                ).value
            ),
        ),
        "relaxations.two_tokens": (0.02, lambda: oa.relaxations.two_tokens(g.softmax(), radius=size["radius"]()).value),
        "flow": (
            0.5,
            lambda: (
                oa.flow(
                    g.attention(),
                    g.pick((g.discrete, g.sequence))(),
                    t_span=g.spoiled((0.0, 0.3)),
                    normalization=g.number(None, None, "sphere", "rescaled"),
                    rtol=g.number(1e-6),
                ).points
            ),
        ),
        "residual_steps": (
            0.5,
            lambda: (
                oa.residual_steps(g.attention(), g.discrete(), depth=g.number(1, 4), t_span=g.spoiled((0, 1))).points
            ),
        ),
        "gaussian_flow": (
            0.2,
            lambda: oa.gaussian_flow(g.attention(), g.gaussian(), t_span=g.spoiled((0.0, 0.5))).blow_up_time,
        ),
        "gaussian_flow_batch": (
            0.1,
            lambda: (
                oa.gaussian_flow_batch(
                    g.attention(), [g.symmetric() for _ in range(2)], t_span=(0.0, 0.2)
                ).blow_up_times
            ),
        ),
        "flow_stability": (
            0.1,
            lambda: (
                oa.flow_stability(
                    g.attention(),
                    mu(),
                    nu(),
                    t_span=(0.0, 0.2),
                    t_eval=g.spoiled(np.array([0.1, 0.2])),
                    bounds=False,
                    p=p(),
                ).worst
            ),
        ),
        "token_clusters": (
            0.2,
            lambda: oa.token_clusters(
                oa.flow(g.softmax(), g.discrete(), t_span=(0.0, 0.2)), tol=g.number(None, 0.1)
            ).counts.astype(float),
        ),
        "limit_polytope": (
            0.2,
            lambda: (
                oa.limit_polytope(oa.flow(g.softmax(), g.discrete(), t_span=(0.0, 0.2)), tol=g.number(1e-3)).n_vertices
            ),
        ),
        "flow_radius_bound": (0.5, lambda: oa.flow_radius_bound(g.attention(), g.number(1.0), g.number(0.5, 1.0))),
        "covariance_tangent": (0.5, lambda: oa.covariance_tangent(g.attention(), g.symmetric())),
    }


def one_call(seed: int, *, names: tuple[str, ...] | None = None, limit: int = 60) -> tuple[str, str]:
    """Make one random call; returns its name and the outcome: "value" or the name of an allowed error.

    Raises what is not allowed: another exception, a warning, a hang, a value that is not a number.
    """
    g = Draw(np.random.default_rng(seed))
    calls = _calls(g)
    chosen = list(calls) if names is None else list(names)
    weights = np.array([calls[k][0] for k in chosen])
    name = str(g.rng.choice(chosen, p=weights / weights.sum()))
    with limited(limit), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            value = calls[name][1]()
        except ALLOWED as exc:
            # numpy's and scipy's own messages mean that nobody checked
            if isinstance(exc, np.linalg.LinAlgError) or not str(exc):
                raise AssertionError(f"{name} raised {type(exc).__name__}({exc})") from exc
            return name, type(exc).__name__
    if isinstance(value, float | np.ndarray) and np.asarray(value).dtype.kind == "f":
        assert not np.isnan(value).any(), f"{name} returned nan"
    return name, "value"
