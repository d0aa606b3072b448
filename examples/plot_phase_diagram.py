r"""When do tokens on a sphere meet? A phase diagram over time and sharpness, and the equiangular curve
===================================================================================================

Tokens on the unit sphere with Q = K = sqrt(beta) I and V = I, ``x' = P_x Gamma(x)`` (LayerNorm in continuous time). For beta
near 0 all of them meet quickly, and the sharper the attention, the longer they wait. Tokens that all stand at the same angle
to one another keep doing so, whatever n <= d, and their cosine c solves a scalar equation,

.. math:: c' = \frac{2 e^{\beta c} (1 - c) ((n - 1) c + 1)}{e^{\beta} + (n - 1) e^{\beta c}}.

In high dimension random tokens are nearly orthogonal to one another, so they should follow the curve that starts at c(0) = 0.

Reproduces: Geshkovski, Letrouit, Polyanskiy, Rigollet, "A mathematical perspective on transformers", 2023: the theorem on
equiangular tokens and its scalar equation, and the phase diagrams of the share of pairs that are 1e-3 close over (t, beta).

How the numbers compare: the flow of 32 orthogonal tokens follows the scalar equation to 3e-9. In dimension 128 the share of
close pairs of random tokens jumps from 0 to 1 in a narrow band along the equiangular curve: half of the pairs are close
at 0.84 to 1.05 of its time. In the plane the transition is gradual, and for large beta clusters of some of the
tokens last (metastability), as published.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels
from scipy.integrate import solve_ivp

import otattn as oa

N, DRAWS, CLOSE = 32, 4, 1e-3
TIMES = np.linspace(0.0, 30.0, 91)
DIMS = {2: np.linspace(0.0, 9.0, 19), 128: np.linspace(0.0, 7.0, 22)}
PARTICLES = ["cosines of particles", *[None] * 7]
BETAS = {1.0: "blue", 4.0: "orange", 5.0: "green", 6.0: "red"}


def cosines(beta: float, X: np.ndarray, times: np.ndarray, rtol: float) -> np.ndarray:
    """Cosines of all pairs of tokens along the flow, ``(T, n, n)``."""
    d = X.shape[1]
    attention = oa.SoftmaxAttention(beta * np.eye(d), np.eye(d))
    run = oa.flow(
        attention, X, t_span=(0.0, times[-1]), normalization="sphere", t_eval=times, rtol=rtol, atol=1e-2 * rtol
    )
    return np.asarray(run.points @ np.swapaxes(run.points, 1, 2))


def equiangular(beta: float, times: np.ndarray) -> np.ndarray:
    """The solution of the scalar equation from c(0) = 0."""

    def slope(t: float, c: np.ndarray) -> np.ndarray:
        return 2.0 * (1.0 - c) * ((N - 1) * c + 1.0) / (np.exp(beta * (1.0 - c)) + N - 1)

    run = solve_ivp(slope, (0.0, times[-1]), [0.0], method="DOP853", t_eval=times, rtol=1e-11, atol=1e-13)
    return np.asarray(run.y[0])


def close_pairs(d: int, betas: np.ndarray) -> np.ndarray:
    """Share of the pairs with a cosine above 1 - 1e-3, ``(betas, times)``, the mean of some draws."""
    rng = np.random.default_rng(d)
    share = np.zeros((len(betas), len(TIMES)))
    pairs = np.triu_indices(N, 1)
    for _ in range(DRAWS):
        X = rng.standard_normal((N, d))
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        for row, beta in zip(share, betas, strict=True):
            row += np.mean(cosines(beta, X, TIMES, 1e-6)[:, pairs[0], pairs[1]] > 1.0 - CLOSE, axis=1) / DRAWS
    return share


def first(values: np.ndarray, level: float, times: np.ndarray) -> float:
    """First of the times from which ``values`` are at least ``level``; nan when there is none."""
    return float(times[np.argmax(values >= level)]) if values[-1] >= level else float("nan")


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("phase_diagram", __doc__, argv)
    fine = np.linspace(0.0, 30.0, 301)
    particles = {beta: cosines(beta, np.eye(N, 2 * N), fine, 1e-9)[:, 0, 1:] for beta in BETAS}
    scalar = {beta: equiangular(beta, fine) for beta in BETAS}
    error = max(float(np.abs(particles[beta] - scalar[beta][:, None]).max()) for beta in BETAS)
    share = {d: close_pairs(d, betas) for d, betas in DIMS.items()}
    curve = {d: np.array([first(equiangular(b, fine), 1.0 - CLOSE, fine) for b in betas]) for d, betas in DIMS.items()}
    ratios = np.array([first(row, 0.5, TIMES) for row in share[128]]) / curve[128]
    ratios = ratios[np.isfinite(ratios)]
    width = [first(row, 0.9, TIMES) / first(row, 0.1, TIMES) for row in share[128]]
    stuck = float(share[2][-1, -1])
    print(f"equiangular tokens, beta = {list(BETAS)}: cosines within {error:.1e} of the scalar equation")
    print(f"d = 128: half of the pairs are close at {ratios.min():.2f} to {ratios.max():.2f} of the equiangular time")
    print(f"d = 128: from a tenth to nine tenths of the pairs in {np.nanmax(width):.2f} times the time or less")
    print(f"d = 2, beta = 9: {share[2][-1, 60]:.0%} of the pairs are close at t = 20, {stuck:.0%} at t = 30")
    print(
        f"headline: the flow follows the equiangular curve to {error:.1e}; random tokens in dimension 128 meet at "
        f"{ratios.min():.2f} to {ratios.max():.2f} of its time; in the plane {stuck:.0%} of the pairs have met at beta = 9"
    )
    assert error < 1e-6, f"equiangular tokens should follow the scalar equation, received an error of {error:.1e}"
    assert len(ratios) >= 10, f"half of the pairs should meet for most beta, received {len(ratios)}"
    assert 0.6 < ratios.min() <= ratios.max() < 1.1, f"random tokens should follow the curve, received {ratios}"
    assert share[128][0, -1] == share[2][0, -1] == 1.0, "all pairs should meet at beta = 0"
    assert stuck < 0.9, f"the clusters of the plane should last at beta = 9, received {stuck:.0%} close pairs"
    assert abs(stuck - share[2][-1, 60]) < 0.1, "the share of close pairs should hardly move from t = 20 to 30"
    pictures.save(draw(share, curve, particles, scalar, fine), "phase_diagram")


def draw(share: dict, curve: dict, particles: dict, scalar: dict, fine: np.ndarray) -> object:
    """Two phase diagrams, and the cosines of equiangular tokens."""
    figure, axes = panels(3, size=(4.3, 3.9))
    for ax, (d, betas) in zip(axes, DIMS.items(), strict=False):
        picture = ax.pcolormesh(TIMES, betas, share[d], cmap="cividis", vmin=0.0, vmax=1.0, shading="gouraud")
        ax.plot(curve[d], betas, color="white", lw=2.0, label="equiangular tokens, $c = 1 - 10^{-3}$")
        ax.set(xlabel="time t", ylabel=r"sharpness $\beta$", xlim=(0.0, 30.0), ylim=(0.0, betas[-1]))
        ax.set_title(f"random tokens, d = {d}", fontsize=10)
    axes[1].legend(fontsize=8, frameon=False, labelcolor="white", loc="upper left")
    figure.colorbar(picture, ax=axes[1], label=r"share of pairs with cosine above $1 - 10^{-3}$")
    ax = axes[2]
    for beta, color in BETAS.items():
        ax.plot(
            fine, scalar[beta], color=oa.plotting.COLORS[color], lw=1.5, label=rf"scalar equation, $\beta = {beta:g}$"
        )
    marks = np.concatenate([particles[beta][::10, [0, -1]].T for beta in BETAS])
    ax.plot(fine[::10], marks.T, color="black", marker="o", ms=3.5, mfc="none", mew=0.7, ls="none", label=PARTICLES)
    ax.set(xlabel="time t", ylabel="cosine c of each pair", ylim=(-0.03, 1.05))
    ax.set_title(f"orthogonal tokens, d = {2 * N}", fontsize=10)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    figure.suptitle(f"{N} tokens on the sphere, $A = \\beta I$, $V = I$", fontsize=11)
    return figure


if __name__ == "__main__":
    main()
