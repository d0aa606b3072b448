"""Pictures of flows: what they draw is what the results hold."""

import numpy as np
import pytest

from otattn.attention import LinearAttention, SoftmaxAttention
from otattn.dynamics import (
    depth_convergence,
    flow,
    flow_stability,
    gaussian_flow_batch,
    limit_polytope,
    limit_rank_histogram,
    mean_field_limit,
    token_clusters,
)
from otattn.measures import DiscreteMeasure, GaussianMeasure
from otattn.plotting import flows as pictures
from otattn.plotting import gaussian_flows as cones

I2 = np.eye(2)
X = np.random.default_rng(0).normal(size=(8, 2))


def test_token_flow():
    out = flow(SoftmaxAttention(I2, I2), DiscreteMeasure(X[:3], [0.5, 0.3, 0.2]), t_span=(0, 1))
    ax = pictures.plot_token_flow(out)
    assert np.allclose(ax.lines[1].get_xydata(), out.points[:, 1])
    assert np.allclose(ax.collections[1].get_offsets(), out.points[-1])
    assert np.allclose(ax.collections[0].get_sizes(), 54 * np.array([0.5, 0.3, 0.2]))
    assert pictures.plot_token_flow(out, ax=ax) is ax
    line = pictures.plot_token_flow(flow(LinearAttention([[1.0]], [[-1.0]]), X[:, :1], t_span=(0, 1)))
    assert len(line.lines) == 8
    with pytest.raises(ValueError, match="dimension 1 or 2"):
        pictures.plot_token_flow(flow(SoftmaxAttention(np.eye(3), np.eye(3)), np.eye(3), t_span=(0, 1)))


def test_sphere_and_clusters(tmp_path):
    Y = np.random.default_rng(1).normal(size=(6, 3))
    out = flow(SoftmaxAttention(np.eye(3), np.eye(3)), Y, t_span=(0, 5), normalization="sphere")
    ax = pictures.plot_sphere_flow(out)
    assert ax.name == "3d"
    ax.figure.savefig(tmp_path / "sphere.png", dpi=40)
    history = token_clusters(out, tol=0.3)
    counts = pictures.plot_cluster_counts(history)
    assert counts.lines[0].get_ydata().tolist() == history.counts.tolist()
    with pytest.raises(ValueError, match="dimension 3"):
        pictures.plot_sphere_flow(flow(SoftmaxAttention(I2, I2), X, t_span=(0, 1)))
    with pytest.raises(ValueError, match="three-dimensional"):
        pictures.plot_sphere_flow(out, ax=counts)


def test_polytope():
    out = flow(SoftmaxAttention(3 * I2, I2), X, t_span=(0, 5), normalization="rescaled")
    polytope = limit_polytope(out)
    ax = pictures.plot_limit_polytope(polytope, out)
    assert len(ax.patches[0].get_xy()) == polytope.n_vertices + 1  # closed
    assert f"{polytope.n_vertices} vertices" in [t.get_text() for t in ax.get_legend().get_texts()]


def test_stability_depth_and_mean_field(tmp_path):
    out = flow_stability(SoftmaxAttention(3 * I2, I2), X[:4], X[4:], t_span=(0, 2), t_eval=[0.0, 1.0, 2.0])
    ax = pictures.plot_flow_stability(out)
    assert np.allclose(ax.lines[0].get_ydata(), np.log10(out.ratios))
    assert len(ax.lines) == 1 + len(out.log_bounds) + 1
    ax.figure.savefig(tmp_path / "stability.png", dpi=40)
    study = depth_convergence(SoftmaxAttention(I2, I2), X, depths=[8, 16, 32])
    assert np.allclose(pictures.plot_depth_convergence(study).lines[0].get_ydata(), study.errors)
    law = GaussianMeasure([0.0, 0.0], I2)
    limit = mean_field_limit(SoftmaxAttention(I2, -I2), law, n_values=[10, 20], samples=2, t_span=(0, 0.3), rng=0)
    ax = pictures.plot_mean_field_limit(limit)
    assert len(ax.lines) == 3
    ax.figure.savefig(tmp_path / "limit.png", dpi=40)


def test_gaussian_pictures(tmp_path):
    covs = [[[1.0, 0.3], [0.3, 0.5]], [[0.4, 0.0], [0.0, 1.0]]]
    batch = gaussian_flow_batch(SoftmaxAttention(np.diag([1.0, -1.0]), I2), covs, t_span=(0, 0.4))
    ax = cones.plot_covariance_cone(batch)
    ax.figure.savefig(tmp_path / "cone.png", dpi=40)
    points = cones.cone_coordinates(batch[0].covs)
    assert np.allclose(points[0], [0.5, 0.6, 1.5])
    assert (np.hypot(points[:, 0], points[:, 1]) <= points[:, 2] * (1 + 1e-12)).all()  # PSD is the cone
    disc = cones.plot_shape_disc(batch)
    drawn = np.vstack([line.get_xydata() for line in disc.lines])
    assert (np.hypot(*drawn.T) <= 1 + 1e-12).all()
    assert {t.get_text() for t in disc.get_legend().get_texts()} == {"exists to the end"}
    grown = gaussian_flow_batch(SoftmaxAttention(np.diag([1.0, -1.0]), I2), covs, t_span=(0, 9))
    assert {t.get_text() for t in cones.plot_shape_disc(grown).get_legend().get_texts()} == {"blows up"}
    assert len(cones.plot_covariance_ellipses(batch[0], count=3).lines) == 3
    histogram = limit_rank_histogram(dim=3, draws=20, rng=0)
    ax = cones.plot_rank_histogram(histogram)
    assert sum(p.get_height() for p in ax.patches) == 20
    with pytest.raises(ValueError, match="dimension 2"):
        cones.plot_shape_disc(gaussian_flow_batch(SoftmaxAttention([[1.0]], [[1.0]]), [[[1.0]]], t_span=(0, 0.1)))
    with pytest.raises(ValueError, match="at least one"):
        cones.plot_covariance_cone([])


def test_animation(tmp_path):
    from PIL import Image

    out = flow(SoftmaxAttention(I2, I2), X, t_span=(0, 1))
    path = pictures.animate_flow(out, tmp_path / "flow.gif", frames=4, dpi=40)
    with Image.open(path) as image:
        assert image.n_frames == 4
    with pytest.raises(ValueError, match="must end in"):
        pictures.animate_flow(out, tmp_path / "flow.txt")
    with pytest.raises(ValueError, match="dimension 2"):
        pictures.animate_flow(flow(LinearAttention([[1.0]], [[-1.0]]), [[1.0]], t_span=(0, 1)), tmp_path / "a.gif")
