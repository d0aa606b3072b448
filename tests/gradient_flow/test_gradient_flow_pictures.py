"""Pictures show the numbers of their results."""

import numpy as np
import pytest

from otattn.attention import SoftmaxAttention
from otattn.gradient_flow import displacement_convexity, energies, energy_dissipation, structure_table
from otattn.plotting.gradient_flows import (
    plot_displacement_convexity,
    plot_energy_dissipation,
    plot_structure_table,
)
from otattn.plotting.style import save

A = np.array([[1.0, 0.5], [0.5, -1.0]])
X = np.random.default_rng(0).standard_normal((5, 2))


def test_energy_along_the_flow(tmp_path) -> None:
    result = energy_dissipation(SoftmaxAttention(A, -A), X)
    ax = plot_energy_dissipation(result)
    lines = [line.get_ydata() for line in ax.get_lines()]
    assert np.allclose(lines[0], lines[1], rtol=1e-6, atol=1e-12)
    assert "descent" in ax.get_title()
    assert ax.get_xlabel()
    save(ax, tmp_path / "energy.png", dpi=40)
    assert (tmp_path / "energy.png").stat().st_size > 1000


def test_table_of_defects(tmp_path) -> None:
    table = structure_table(dim=2, n=4, rng=1)
    ax = plot_structure_table(table)
    (image,) = ax.get_images()
    data = image.get_array()
    assert data.shape == (len(table.entries), 6)
    # a dash, and a masked cell, exactly where a test does not apply
    missing = sum(value is None for row in table.entries for value in row.report.defects.values())
    assert int(np.ma.getmaskarray(data).sum()) == missing == sum(t.get_text() == "–" for t in ax.texts)
    assert data[0, 1] == pytest.approx(np.log10(table.entries[0].report.wasserstein_defect))
    save(ax, tmp_path / "table.png", dpi=40)


def test_curve_along_a_geodesic(tmp_path) -> None:
    result = displacement_convexity(energies.SigmoidEnergy(-A), X, -X[::-1] + 0.3)
    ax = plot_displacement_convexity(result)
    curve = ax.get_lines()[0]
    assert np.array_equal(curve.get_ydata(), result.energies)
    assert ax.get_lines()[2].get_xdata()[0] == result.time
    save(ax, tmp_path / "curve.png", dpi=40)
