r"""Which attention is a gradient flow, and of what
===============================================

Tokens that follow attention, ``x_i' = Gamma_mu(x_i)``, may descend an energy of their measure. Four nested questions
are put to every variant: is the field a gradient for each measure; is it the Wasserstein gradient of an energy; does it
become one after multiplication with the normaliser Z or with any mobility; and is at least the flow of covariances of
centred Gaussians a Bures-Wasserstein gradient flow? Each answer is the asymmetry of one matrix, 0 where the structure
holds. Where an energy is known, its change along a flow is compared with the work of the velocity.

Reproduces: Sander, Ablin, Blondel, Peyré, "Sinkformers", AISTATS 2022: with V = A symmetric Sinkhorn attention is a
Wasserstein gradient flow and softmax attention is none; and Castin, Ablin, Carrillo, Peyré, "A Unified Perspective on
the Dynamics of Deep Transformers", 2025: softmax attention is one for a twisted metric (mobility 1/Z), and its flow of
Gaussians is a Bures-Wasserstein gradient flow.

How the numbers compare: the defects are 1e-11 or less wherever the papers prove a structure and 0.1 to 1 where there is
none, so the table separates the cases by nine powers of ten. Energy balances hold to 1e-10. Beyond the papers: the
unnormalised kernels are Wasserstein gradient flows, L2 attention with tied queries and keys is one only on Gaussians,
masked attention is none.
"""

from collections.abc import Sequence

import numpy as np
from _gallery import gallery, panels

import otattn as oa


def main(argv: Sequence[str] | None = None) -> None:
    pictures = gallery("gradient_flow_table", __doc__, argv)
    table = oa.structure_table(dim=3, n=8, rng=0)
    print(table.to_markdown())
    verdicts = {
        row.variant: table.report(row.variant, "V = A").verdict for row in table.entries if row.values == "V = A"
    }
    defects = np.array([v for row in table.entries for v in row.report.defects.values() if v is not None])
    gap = defects[defects > 1e-6].min() / defects[defects <= 1e-6].max()
    print(f"headline: softmax: {verdicts['softmax']}; Sinkhorn: {verdicts['Sinkhorn']}; the cases are {gap:.0e} apart")
    assert verdicts["softmax"] == "gradient flow with mobility 1/Z", verdicts
    assert verdicts["Sinkhorn"] == "Wasserstein gradient flow", verdicts
    assert table.report("softmax", "V = I").verdict == "no gradient structure"
    assert gap > 1e6, f"defects should be tiny or large, received a gap of {gap:.0e}"

    pictures.save(oa.plotting.plot_structure_table(table), "gradient_flow_table")
    rng = np.random.default_rng(0)
    X = rng.standard_normal((8, 3))
    A = table.report("softmax", "V = A").attention.A
    _, axes = panels(2)
    for ax, attention in zip(axes, (oa.SoftmaxAttention(A, A), oa.SinkhornAttention(A, -A)), strict=True):
        balance = oa.energy_dissipation(attention, X, t_span=(0.0, 0.3), n_times=11)
        assert balance.defect < 1e-6, f"the energy balance should hold, received a defect of {balance.defect:.1e}"
        oa.plotting.plot_energy_dissipation(balance, ax=ax)
        name = type(attention).__name__.removesuffix("Attention")
        ax.set_title(f"{name}, {ax.get_title().split(',')[1].split(':')[0].strip()}", fontsize=10)
    pictures.save(axes[0], "energy_balance")


if __name__ == "__main__":
    main()
