r"""From n tokens to any measure: where the mean-field bound takes over
===================================================================

For n tokens in the ball of radius R the Lipschitz constant is at most of the order ``R^2 sqrt(n)``; for arbitrary
measures of the ball there is a bound without n, but exponential in ``||A|| R^2``. Which of the two is smaller depends
on n, and the crossover tells from how many tokens on "a sequence is a measure" is the better point of view.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, the two regimes: Theorem 3.3 for n tokens, the
mean-field bound of Geshkovski, Letrouit, Polyanskiy, Rigollet (2023), and their lower bounds, which put the crossover
at ``n`` of the order ``e^(2 gamma R^2)``.

How the numbers compare: for A = -I, V = I the published pair crosses at ``log n = 4 R^2`` up to logarithms, twice the
rate of the lower bounds. Ours, whose exponents match the lower bounds, cross at ``log n = 2 R^2`` up to logarithms:
at R = 3 from 10^7.9 tokens on instead of 10^15.5.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa

RADII = np.array([1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0])
LOG10 = np.log(10.0)


def log10_of(bound: oa.Bound) -> float:
    return float(bound.log_value) / LOG10


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("mean_field_crossover", __doc__, argv)
    attention = oa.SoftmaxAttention(-np.eye(3), np.eye(3))
    crossings = [oa.bounds.crossover(attention, radius) for radius in RADII]
    published = np.array([c.log_published for c in crossings])
    ours = np.array([c.log_ours for c in crossings])
    for radius, first, second in zip(RADII, published / LOG10, ours / LOG10, strict=True):
        print(f"R = {radius:.1f}: published bounds cross at n = 10^{first:.1f}, ours at 10^{second:.1f}")
    # the growth of log n in R^2 over the second half of the radii, where logarithms matter less
    rates = [float(np.polynomial.polynomial.polyfit(RADII[3:] ** 2, y[3:], 1)[1]) for y in (published, ours)]
    print(
        f"headline: log n grows like {rates[0]:.2f} R^2 (published) and {rates[1]:.2f} R^2 (ours); lower bounds 2 R^2"
    )
    assert np.all(ours < published), "our bounds should cross earlier at every radius"
    assert abs(rates[0] - 4.0) < 0.3, f"the published rate should be about 4, received {rates[0]:.2f}"
    assert abs(rates[1] - 2.0) < 0.3, f"our rate should be about 2, received {rates[1]:.2f}"

    radius = 3.0
    grid = np.linspace(0.0, 1.1 * crossings[4].log_published / LOG10, 60)
    sizes = [max(1, round(10.0**x)) for x in grid]
    discrete = {
        "published, n tokens": [log10_of(oa.bounds.castin2024_discrete(attention, radius=radius, n=n)) for n in sizes],
        "ours, n tokens": [log10_of(oa.bounds.row_bound(attention, radius=radius, n=n)) for n in sizes],
    }
    mean_field = {
        "published, any measure": log10_of(oa.bounds.geshkovski2024_mean_field(attention, radius=radius)),
        "ours, any measure": min(
            log10_of(oa.bounds.column_bound(attention, radius=radius)),
            log10_of(oa.bounds.density_bound(attention, radius=radius)),
        ),
    }
    marks = {"published": crossings[4].log_published / LOG10, "ours": crossings[4].log_ours / LOG10}
    gain = 10.0 ** (discrete["published, n tokens"][-1] - discrete["ours, n tokens"][-1])
    discrete[f"ours, n tokens ({gain:.1f} times less)"] = discrete.pop("ours, n tokens")
    _, (left, right) = panels(2, size=(5.0, 4.2))
    oa.plotting.plot_crossover(grid, discrete, mean_field, crossings=marks, ax=left)
    lower = log10_of(oa.bounds.castin2024_mean_field_lower(attention, radius=radius))
    left.axhline(lower, color=oa.plotting.COLORS["green"], ls=":", lw=2, label="lower bound, any measure")
    left.set_title("A = -I, V = I, R = 3", fontsize=10)
    left.set_ylim(top=15.0)
    left.legend(fontsize=8, frameon=False, loc="upper left", ncols=2)

    for name, y, color in (("published bounds", published, "red"), ("our bounds", ours, "blue")):
        right.plot(RADII**2, y / LOG10, color=oa.plotting.COLORS[color], marker="o", ms=5, label=name)
    right.plot(
        RADII**2, 2.0 * RADII**2 / LOG10, color=oa.plotting.COLORS["green"], ls=":", label="lower bounds, $e^{2 R^2}$"
    )
    right.set_xlabel("$R^2$, the squared radius of the token ball")
    right.set_ylabel(r"$\log_{10}$ of the n where they cross")
    right.legend(fontsize=8, frameon=False)
    pictures.save(left, "mean_field_crossover")


if __name__ == "__main__":
    main()
