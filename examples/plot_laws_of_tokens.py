r"""Which law of tokens grows like n^(1/4)?
=======================================

On text the local constant of a trained head grows with the number of tokens about like n^(1/4); why is an open question of the
talks on the subject. We measure every second head of the bundled layer (attention layer 3 of all-MiniLM-L6-v2) on the text and on
random tokens fitted to it: the same mean, the same covariance, the same correlation of neighbours, clusters, heavy tails.
None reproduces the growth, until one token is put back: the first of every window, the marker [CLS] of the model.

One picture: the fitted exponents, n = 8 to 120, with the standard error over four windows, as each law is and with the text's own
first token in front.

Reproduces: Castin, Ablin, Peyré, "How Smooth Is Attention?", ICML 2024, the fit n^(1/4) on text, of which the paper leaves the reason
open.

How the numbers compare: the text gives 0.24 ± 0.01, and 0.09 without its first token. Independent Gaussian tokens give 0.16 and
with the first token 0.24, correlated neighbours 0.17 and 0.24, clusters 0.11 and 0.22, white tokens -0.05 and 0.31. (Over all
twelve heads: text 0.21 and 0.07, Gaussian 0.13 and 0.22, n = 8 to 128.) Heavy tails give far too much, since single tokens
decide: LayerNorm makes all tokens about as long, so the text has none. The growth is that of an anchor, which rows share: the
mean share of the first token falls from 0.6 at n = 8 to 0.3 at n = 120, slower than ``n^(-1/2)``, so its column of the attention
matrix has a norm that grows like n^0.27. The finding is about this layer; models without a common first token remain open.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _gallery import gallery, panels
from scipy.cluster.vq import kmeans2

import otattn as oa

SIZES = (8, 32, 120)
CLUSTERS, FREEDOM = 16, 5


def laws(X: np.ndarray, rng: np.random.Generator) -> dict[str, Callable[[], np.ndarray]]:
    """Windows of random tokens of the shape of ``X (windows, n, d)``, from laws fitted to it."""
    flat = X.reshape(-1, X.shape[2])
    mean = flat.mean(axis=0)
    centred = X - mean
    _, s, rows = np.linalg.svd(flat - mean, full_matrices=False)
    root = s[:, None] * rows / np.sqrt(len(flat))  # root^T root is the covariance
    rho = float((centred[:, 1:] * centred[:, :-1]).sum() / (centred[:, 1:] ** 2).sum())

    def noise() -> np.ndarray:
        return rng.standard_normal((*X.shape[:2], len(root))) @ root

    def white() -> np.ndarray:
        return mean + rng.standard_normal(X.shape) * np.sqrt((centred**2).mean())

    def correlated() -> np.ndarray:
        Z = noise()
        for t in range(1, X.shape[1]):
            Z[:, t] = rho * Z[:, t - 1] + np.sqrt(1.0 - rho**2) * Z[:, t]
        return mean + Z

    def clustered() -> np.ndarray:
        centres, labels = kmeans2(flat, CLUSTERS, seed=1, minit="++")
        drawn = rng.choice(labels, size=X.shape[:2])  # clusters as frequent as in the text
        left = flat - centres[labels]
        _, size, axes = np.linalg.svd(left, full_matrices=False)
        inner = size[:, None] * axes / np.sqrt(len(flat))
        return centres[drawn] + rng.standard_normal((*X.shape[:2], len(inner))) @ inner

    def heavy() -> np.ndarray:
        scale = rng.chisquare(FREEDOM, (*X.shape[:2], 1)) / (FREEDOM - 2)  # the covariance stays
        return mean + noise() / np.sqrt(scale)

    return {
        "white Gaussian": white,
        "Gaussian": lambda: mean + noise(),
        "correlated neighbours": correlated,
        f"{CLUSTERS} clusters": clustered,
        f"Student, {FREEDOM} degrees": heavy,
    }


def first_column(heads: Sequence[Any], X: np.ndarray) -> list[float]:
    """The Euclidean norm of the attention that the rows give the first token, mean over heads and windows."""

    def norm(head: Any, tokens: np.ndarray) -> float:
        logits = head.logits(tokens)
        P = np.exp(logits - logits.max(axis=1, keepdims=True))
        return float(np.linalg.norm(P[:, 0] / P.sum(axis=1)))

    return [float(np.mean([norm(head, window[:n]) for head in heads for window in X])) for n in SIZES]


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("laws_of_tokens", __doc__, argv)
    layer = oa.load_sample()
    X, first = layer.hidden_states, layer.hidden_states[:, :1]

    def grown(windows: np.ndarray) -> Any:
        return oa.local_growth(layer.heads[::2], windows, n_values=SIZES).mean_exponent()

    found = {"text": (grown(X[:, 1:]), grown(X))}
    for name, law in laws(X, np.random.default_rng(0)).items():
        Z = law()
        found[name] = (grown(Z), grown(np.concatenate([first, Z[:, 1:]], axis=1)))
    for name, (own, anchored) in found.items():
        print(
            f"{name:>22}: n^({own.exponent:.2f} ± {own.standard_error:.2f}), with the first token of the text "
            f"n^({anchored.exponent:.2f} ± {anchored.standard_error:.2f})"
        )
    without, text = (e.exponent for e in found["text"])
    gauss, anchored = (e.exponent for e in found["Gaussian"])
    print(
        f"headline: text n^{text:.2f}, its first token left out n^{without:.2f}; Gaussian n^{gauss:.2f}, "
        f"with that token n^{anchored:.2f}"
    )
    assert 0.15 < text < 0.3, f"text should give about n^(1/4), received n^{text:.2f}"
    assert without < 0.5 * text, f"without its first token it should grow much slower, received n^{without:.2f}"
    assert abs(anchored - text) < 0.05, (
        f"Gaussian tokens with the anchor should grow like the text, received n^{anchored:.2f}"
    )
    assert abs(gauss - text) > 0.05, f"Gaussian tokens alone should not, received n^{gauss:.2f}"

    columns = first_column(layer.heads[::2], X)
    slope = float(np.polynomial.polynomial.polyfit(np.log(SIZES), np.log(columns), 1)[1])
    print(
        f"the first column of the attention matrix of the text has norms {np.round(columns, 2).tolist()}: n^{slope:.2f}"
    )
    assert abs(slope - text) < 0.1, f"the first column should grow like the constant, received n^{slope:.2f}"

    colors = oa.plotting.COLORS
    _, (ax,) = panels(1, size=(6.4, 4.0))
    y = np.arange(len(found))
    for k, (label, color) in enumerate(
        (("without that token", "orange"), ("with the first token of the text", "blue"))
    ):
        fits = [pair[k] for pair in found.values()]
        ax.errorbar(
            [f.exponent for f in fits],
            y + 0.12 * (k - 0.5),
            xerr=[f.standard_error for f in fits],
            color=colors[color],
            marker="o",
            ls="none",
            capsize=2,
            label=label,
        )
    ax.axvline(0.25, color=colors["grey"], ls=":", lw=1)
    ax.set_yticks(y, list(found))
    ax.invert_yaxis()
    ax.set_xlabel("growth exponent of the local constant, six heads (dotted: 1/4)")
    ax.legend(fontsize=8, frameon=False)
    pictures.save(ax, "laws_of_tokens")


if __name__ == "__main__":
    main()
