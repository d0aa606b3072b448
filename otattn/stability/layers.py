"""Every layer and head of a real model on windows of real tokens: how much each stretches, and what was proved about it.

Text becomes windows (:func:`otattn.models.text_windows`), windows become the tokens that each layer's attention sees
(:meth:`otattn.models.Transformer.walk`), and each head is measured on them. Finished heads are kept on disk, so that an
interrupted run goes on where it stopped.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from tqdm.auto import tqdm

from otattn import _validate as check
from otattn._linalg import Array
from otattn._progress import LOG
from otattn._tabular import Result
from otattn.lipschitz.local.growth import Exponent, fit_exponent
from otattn.models import Transformer
from otattn.stability.heads import FIELDS, HeadStore, measure_head
from otattn.stability.study import check_key

__all__ = ["LayerMeasurements", "measure_layers"]

SIZES = (16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class LayerMeasurements(Result):
    """What was measured; axes are (layer, head, window, n) where they apply.

    Attributes
    ----------
    layers, heads : tuple of int
        Which layers and heads, in the order of the axes.
    n_values : ndarray (m,)
        Numbers of tokens: the first n of each window, or windows of n tokens that the model read on their own.
    particle, splitting : ndarray (L, H, w, m)
        Parts of the W_2 local constant, see :func:`otattn.local_lipschitz`. Values are those of a head before its output
        matrix.
    radii : ndarray (L, w, m)
        Largest norm of the n tokens that the attention sees.
    domain_radius : ndarray (L,)
        Largest norm that the normalisation in front of the layer allows.
    norms : ndarray (L, H, 2)
        Spectral norms of A and V. For rotary heads A is the form at offset 0.
    gamma : ndarray (L, H)
        ``max(-gamma_min, gamma_max / 8)`` over the real eigenvalues of A, the rate of the published lower bounds.
    published, own : ndarray (L, H, m)
        The published upper bound for n tokens in the ball of radius ``radii.max`` over windows, and the least of our
        closed-form ones. ``published`` is nan for rotary heads: no published theorem covers them.
    ratios : ndarray (L, H, pairs)
        Stability ratios of pairs of runs of tokens, with a nan at the end for every pair that was twice the same run; 0
        pairs when none were asked for.
    p : float
        Order of the Wasserstein distance of ``ratios``.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    n_values: Array
    particle: Array
    splitting: Array
    radii: Array
    domain_radius: Array
    norms: Array
    gamma: Array
    published: Array
    own: Array
    ratios: Array
    p: float

    @property
    def values(self) -> Array:
        """The W_2 local constants, ``max(particle, splitting)``."""
        return np.maximum(self.particle, self.splitting)

    @property
    def stability(self) -> Array:
        """The largest ratio of each head, ``(L, H)``: its empirical stability constant."""
        if self.ratios.shape[2] == 0:
            raise ValueError("stability needs pairs, received a measurement without; measure with n_pairs >= 1.")
        return np.asarray(np.fmax.reduce(self.ratios, axis=2))

    def exponent(self, layer: int | None = None, head: int | None = None) -> Exponent:
        """Growth ``particle ~ n^exponent`` of the mean over all layers and heads that are not named.

        Fitted to each window; the value is the mean over windows and the standard error that of this mean. Heads with large
        constants count more here than in :meth:`mean_exponent`.
        """
        return fit_exponent(self.n_values, self._pick(self.particle, layer, head).mean(axis=(0, 1)))

    def mean_exponent(self, layer: int | None = None) -> Exponent:
        """The mean of the heads' own exponents (of all layers, or of one): the growth of the geometric mean."""
        logs = np.log(self._pick(self.particle, layer, None))
        return fit_exponent(self.n_values, np.exp(logs.mean(axis=(0, 1))))

    def _pick(self, array: Array, layer: int | None, head: int | None) -> Array:
        for axis, (name, wanted, known) in enumerate((("layer", layer, self.layers), ("head", head, self.heads))):
            if wanted is not None:
                if wanted not in known:
                    raise ValueError(f"{name} must be one of {list(known)}, received {wanted!r}; measure it first.")
                array = array.take([known.index(wanted)], axis=axis)
        return array

    def rows(self) -> list[dict[str, Any]]:
        """One record a layer, head and n: the local constant (mean over windows), the published bound and ours."""
        columns = {"local": self.values.mean(axis=2), "published": self.published, "own": self.own}
        axes = ((i, layer, j, head) for i, layer in enumerate(self.layers) for j, head in enumerate(self.heads))
        return [
            {"layer": layer, "head": head, "n": int(n), **{name: float(v[i, j, k]) for name, v in columns.items()}}
            for i, layer, j, head in axes
            for k, n in enumerate(self.n_values)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, ready for JSON (nan becomes None)."""
        out: dict[str, Any] = {"layers": list(self.layers), "heads": list(self.heads), "p": self.p}
        out["n"] = [int(n) for n in self.n_values]
        for name in FIELDS:
            value: Array = getattr(self, name)
            plain = value.astype(object)
            plain[np.isnan(value)] = None
            out[name] = plain.tolist()
        return out

    def __repr__(self) -> str:
        L, H, w, _ = self.particle.shape
        return f"LayerMeasurements(layers={L}, heads={H}, windows={w}, n={[int(n) for n in self.n_values]})"


def measure_layers(
    model: Transformer,
    token_ids: ArrayLike | Mapping[int, ArrayLike],
    *,
    n_values: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    n_pairs: int = 16,
    p: float = 2,
    tol: float = 1e-6,
    rng: int = 0,
    cache: str | os.PathLike[str] | None = None,
    key: str | None = None,
    progress: bool = True,
) -> LayerMeasurements:
    """Local constants, radii, gamma, bounds and stability ratios of the heads of a model on its own tokens.

    Parameters
    ----------
    model : Transformer
        From :func:`otattn.load_model`.
    token_ids : array_like of int (windows, length), or mapping of n to array_like (windows, n)
        See :func:`otattn.models.text_windows`. An array: the model reads whole windows, and heads are measured at the first
        n tokens of each. A mapping: the model reads windows of n tokens on their own, one set for each n, equally many; this
        is what an encoder makes of a text of n tokens. For causal models without special tokens the two are the same.
    n_values : sequence of int, optional
        Increasing numbers of tokens, at most ``length``; 16, 32, 64, 128 by default. Not with a mapping, whose keys they are.
    layers, heads : sequence of int, optional
        Which ones; all by default.
    n_pairs : int
        Pairs of runs of ``length // 2`` tokens for the stability ratios; 0 leaves them out.
    p : float
        Order of the Wasserstein distance of these ratios (conditional for causal heads).
    tol : float
        Residual of the singular value solver.
    rng : int
        Seed of the pairs.
    cache : path, optional
        Folder for finished heads. It may hold several measurements: each has a subfolder named by a hash of weights, tokens
        and options. Files that are damaged or edited are named in a StoreWarning and their heads measured again.
    key : str, optional
        A name of your own for the model, instead of its class, configuration and weights: for models that cannot be hashed,
        or whose weights take long to read. You answer for it that one key is always one model.
    progress : bool
        A bar on stderr.

    Raises
    ------
    ValueError
        Sizes or indices that do not fit, or a cache is asked for a model that cannot be hashed (give ``key=``).
    StoreError
        The cache cannot be written, or has a link in place of a file.
    """
    sizes, inputs = _inputs(model, token_ids, n_values)
    which = _chosen(layers, model.num_layers, "layers")
    count = _chosen(heads, model.config.num_heads, "heads")
    check.count(n_pairs, "n_pairs", least=0)
    order = check.check_order(p)
    check.positive(tol, "tol")
    if isinstance(rng, bool) or not isinstance(rng, (int, np.integer)) or rng < 0:
        raise TypeError(f"rng must be a non-negative integer seed here (results are kept on disk), received {rng!r}.")
    own, options = check_key(key), (order, float(tol), int(rng))
    store = None if cache is None else HeadStore(cache, model, inputs, sizes, n_pairs, options, own)
    found = {(i, h): kept for i in which for h in count if store is not None and (kept := store.get(i, h)) is not None}
    missing = [i for i in which if any((i, h) not in found for h in count)]
    if missing and store is not None:
        store.make()
    total = len(which) * len(count)
    with tqdm(total=total, initial=len(found), desc="heads", unit="head", disable=not progress, leave=False) as bar:
        walks = [model.walk(ids, stop=missing[-1] + 1) for ids in inputs] if missing else []
        for steps in zip(*walks, strict=True):
            layer = steps[0][0]
            if layer.index not in missing:
                continue
            far = float(layer.domain.max_norm)
            seen = [steps[min(j, len(steps) - 1)][2][:, :n] for j, n in enumerate(sizes)]
            for h in count:
                at = layer.index, h
                if at not in found:
                    found[at] = measure_head(layer, h, seen, steps[-1][2], n_pairs, order, tol, int(rng), far)
                    LOG.info("heads: layer %d, head %d, %d of %d", *at, len(found), total)
                    if store is not None:
                        store.put(*at, found[at])
                    bar.update()
    per_head = {name: np.stack([np.stack([found[i, h][name] for h in count]) for i in which]) for name in FIELDS}
    for name in ("radii", "domain_radius"):
        per_head[name] = per_head[name][:, 0]
    fields = {name: check.frozen(value) for name, value in per_head.items()}
    return LayerMeasurements(which, count, check.frozen(np.asarray(sizes, dtype=np.float64)), p=order, **fields)


def _inputs(
    model: Transformer, token_ids: ArrayLike | Mapping[int, ArrayLike], n_values: Sequence[int] | None
) -> tuple[list[int], list[NDArray[np.int64]]]:
    """The numbers of tokens, and the windows: one array for all of them, or one for each."""
    if isinstance(token_ids, Mapping):
        if n_values is not None or not token_ids:
            raise ValueError("n_values must be left out when token_ids maps them to windows, of one n at least.")
        sizes = sorted(check.count(n, "the keys of token_ids") for n in token_ids)
        arrays = [model.ids(token_ids[n]) for n in sizes]
        shapes = [a.shape for a in arrays]
        if any(shape != (len(arrays[0]), n) for shape, n in zip(shapes, sizes, strict=True)):
            raise ValueError(f"token_ids must map each n to (windows, n) with equally many windows, received {shapes}.")
        return sizes, arrays
    ids = model.ids(token_ids)
    length = ids.shape[1]
    wanted = [n for n in SIZES if n <= length] or [length] if n_values is None else n_values
    sizes = [check.count(n, "n_values") for n in wanted]
    if not sizes or sizes != sorted(set(sizes)) or sizes[-1] > length:
        raise ValueError(f"n_values must increase up to at most the window length {length}, received {sizes}.")
    return sizes, [ids]


def _chosen(given: Sequence[int] | None, total: int, name: str) -> tuple[int, ...]:
    if given is None:
        return tuple(range(total))
    out = sorted({check.count(i, name, least=0) for i in given})
    if not out or out[-1] >= total:
        raise ValueError(f"{name} must be indices from 0 to {total - 1}, received {list(given)}; choose among them.")
    return tuple(out)
