"""The catalogue of theorems: complete, honest about what applies, and open to maps that it has never seen."""

import numpy as np
import pytest

import otattn as oa
from otattn.lipschitz import catalogue
from otattn.lipschitz.theorem import THEOREMS, theorem

SOFTMAX = oa.SoftmaxAttention([[1.0, 0.3], [-0.2, 0.8]], [[0.9, 0.4], [0.1, -0.7]])
NORM = oa.RMSNorm([1.0, 2.0], eps=0.1)
MAPS = {
    "softmax": SOFTMAX,
    "biased": oa.SoftmaxAttention(np.eye(2), np.eye(2), bias=[1.0, 0.0]),
    "rotation": oa.SoftmaxAttention([[0.0, 1.0], [-1.0, 0.0]], np.eye(2)),
    "masked": oa.MaskedAttention(SOFTMAX),
    "l2": oa.L2Attention(np.eye(2), 0.5 * np.eye(2), np.eye(2)),
    "tied": oa.L2Attention(np.eye(2), np.eye(2), np.eye(2)),
    "masked l2": oa.MaskedAttention(oa.L2Attention(np.eye(2), np.eye(2), np.eye(2))),
    "relu": oa.ReLUAttention(np.eye(2), np.eye(2)),
    "heads": oa.MultiHeadAttention([SOFTMAX, SOFTMAX]),
    "masked heads": oa.MaskedAttention(oa.MultiHeadAttention([SOFTMAX, SOFTMAX])),
    "mixed heads": oa.MultiHeadAttention([SOFTMAX, oa.SigmoidAttention(np.eye(2), np.eye(2))]),
    "rotary": oa.RotaryAttention(np.eye(2), np.eye(2), np.eye(2)),
    "score": oa.ScoreAttention(np.eye(2), np.eye(2), np.eye(2), cap=0.5),
    "score on all of space": oa.ScoreAttention(
        np.eye(2), np.eye(2), np.eye(2), query_norm=NORM, key_norm=NORM, value_norm=NORM, sink=0.0, mask=oa.Mask()
    ),
    "gated": oa.GatedAttention(SOFTMAX, np.eye(2)),
    "rotary heads": oa.MultiHeadAttention([oa.RotaryAttention(np.eye(2), np.eye(2), np.eye(2))] * 2),
    "sinkhorn": oa.SinkhornAttention(np.eye(2), np.eye(2)),
    "norm": oa.LayerNorm(np.ones(2), eps=1e-3),
}
DOMAINS = {"ball": oa.Ball(1.0), "box": oa.Box([0.0, -1.0], [1.0, 1.0]), "all": None}


@pytest.mark.parametrize("p", [1.0, 2.0, pytest.param(3.0, marks=pytest.mark.slow), np.inf])
@pytest.mark.parametrize("n", [1, pytest.param(2, marks=pytest.mark.slow), 5, None])
@pytest.mark.parametrize("name", MAPS)
def test_what_is_said_to_apply_applies_and_the_rest_gives_its_reason(name: str, n: int | None, p: float) -> None:
    """Every closed form, for every map and domain: a bound with its key, or the reason in the error."""
    attention = MAPS[name]
    for domain in DOMAINS.values():
        for record in THEOREMS.values():
            if not record.closed or record.quantity == "local":
                continue
            why = record.reason(attention, domain, n, p)
            if why is not None:
                assert why.strip()
                with pytest.raises(ValueError, match="does not apply"):
                    catalogue_prove(record.key, attention, domain, n, p)
            elif domain is not None or record.everywhere:
                bound = catalogue_prove(record.key, attention, domain, n, p)
                assert (bound.theorem, bound.kind, bound.quantity) == (record.key, record.kind, record.quantity)
                assert (bound.n, bound.p) == (n, p if record.key != "field_bound" else bound.p)
                assert bound.reference == record.reference


def catalogue_prove(key, attention, domain, n, p):
    from otattn.lipschitz.theorem import prove

    return prove(key, attention, domain, n, p)


def test_the_catalogue_prints_and_lists_every_public_theorem() -> None:
    found = oa.theorems()
    rows = found.rows()
    assert {row["theorem"] for row in rows} == set(THEOREMS)
    assert all(row["statement"] and row["hypotheses"] and row["reference"] for row in rows)
    assert all(row["proof"].startswith("otattn.lipschitz") for row in rows)
    public = {name for name in oa.bounds.__all__ if callable(getattr(oa.bounds, name))}
    closed = {t.key for t in THEOREMS.values() if t.closed}
    other = {
        "BoundTable",
        "Crossover",
        "castin2024_large_radius",
        "crossover",
        "density_constant",
        "hoelder_constant",
        "row_norm",
        "table",
    }
    assert public - other == closed
    assert len(str(found).splitlines()) == len(rows)
    assert repr(found) == f"Catalogue({len(rows)} theorems)"
    assert found.to_dict()["theorems"] == rows


@pytest.mark.parametrize("name", ["row_bound", "multi_head", "whole_block"])
def test_what_is_no_map_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="must be an attention map, received int"):
        getattr(oa.bounds, name)(3, radius=1.0, n=2)


def test_a_bound_for_any_measure_applies_to_tokens() -> None:
    rows = {row["theorem"]: row for row in oa.theorems(SOFTMAX, radius=1.0, n=7).rows()}
    assert rows["geshkovski2024_mean_field"]["applies"]
    assert rows["mean_field"]["applies"]
    assert not rows["castin2024_mean_field_lower"]["applies"]
    assert rows["two_tokens"]["reason"] == "n must be 2, received 7"


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 3, None])
@pytest.mark.parametrize("name", MAPS)
def test_the_best_bound_is_the_least_of_the_theorems_that_apply(name: str, n: int | None) -> None:
    attention = MAPS[name]
    rows = oa.theorems(attention, radius=1.0, n=n).rows()
    keys = [r["theorem"] for r in rows if r["applies"] and r["bounds"] == "lipschitz" and r["kind"] == "upper"]
    if not keys:
        with pytest.raises(ValueError, match="no upper bound applies"):
            oa.lipschitz_upper_bound(attention, radius=1.0, n=n)
        return
    values = [oa.lipschitz_upper_bound(attention, radius=1.0, n=n, theorem=key).value for key in keys]
    assert oa.lipschitz_upper_bound(attention, radius=1.0, n=n).value <= min(values) * (1.0 + 1e-12)


def test_unknown_keys_and_taken_ones_are_refused() -> None:
    with pytest.raises(ValueError, match=r"theorem must be one of .*row_bound.*, received 'row bound'"):
        oa.lipschitz_upper_bound(SOFTMAX, radius=1.0, theorem="row bound")
    with pytest.raises(ValueError, match="theorem must be one of"):
        oa.lipschitz_upper_bound(SOFTMAX, radius=1.0, theorem="field_bound")
    with pytest.raises(ValueError, match="registered already"):
        theorem("row_bound", statement="", hypotheses="", applies=lambda *_: None)(lambda *_: None)
    with pytest.raises(TypeError, match="must be an attention map"):
        oa.theorems(np.eye(2))


def halfway(x, mu):
    """A map of one's own: every token goes half way to the mean."""
    return 0.5 * x + 0.5 * (mu.weights @ mu.points)


def halved_theorem(attention, domain, n, p, exact):
    return oa.Bound(1.0, "upper", p=p, domain=domain, n=n, theorem="halved")


def test_a_theorem_of_ones_own_enters_tables_and_enclosures(monkeypatch) -> None:
    """One record, no other file: the table, the best bound, ``verify`` and the catalogue know it."""
    monkeypatch.setattr(catalogue, "THEOREMS", THEOREMS)
    before = dict(THEOREMS)
    try:
        theorem(
            "halved",
            statement="1",
            hypotheses="the map above",
            applies=lambda attention, *_: None if getattr(attention, "function", None) is halfway else "another map",
            rigorous=False,
        )(halved_theorem)
        attention = oa.FunctionAttention(halfway)
        rows = {row["theorem"]: row for row in oa.theorems(attention, radius=1.0, n=3).rows()}
        assert [key for key, row in rows.items() if row["applies"]] == ["halved"]
        assert (
            rows["row_bound"]["reason"]
            == "attention must be SoftmaxAttention, masked or not, received FunctionAttention"
        )
        bound = oa.lipschitz_upper_bound(attention, radius=1.0, n=3)
        assert (bound.value, bound.theorem) == (1.0, "halved")
        assert bound.verify()
        assert not bound.verify(SOFTMAX)
    finally:
        THEOREMS.clear()
        THEOREMS.update(before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"radius": 1.0, "domain": oa.Ball(2.0)}, ValueError, "at most one of radius and domain"),
        ({"domain": "ball"}, TypeError, "received str"),
        ({"domain": np.eye(2)}, TypeError, "received ndarray"),
        ({"domain": oa.Ball(1.0, 3)}, ValueError, "dimension 2 like the attention, received 3"),
        ({"radius": np.nan}, ValueError, "finite and positive"),
        ({"radius": 1.0, "n": 0}, ValueError, "n must be at least 1"),
        ({"radius": 1.0, "p": 0.5}, ValueError, "p must lie in"),
    ],
)
def test_statements_that_make_no_sense_are_refused(options, error, message) -> None:
    with pytest.raises(error, match=message):
        oa.theorems(SOFTMAX, **options)


def test_only_what_holds_on_all_of_space_applies_without_a_domain() -> None:
    """Softmax attention is not Lipschitz on R^d: no upper bound may say that it applies there."""
    for name, attention in MAPS.items():
        applying = [row["theorem"] for row in oa.theorems(attention, n=3).rows() if row["applies"]]
        scores = {"score_row_bound", "score_column_bound", "score_average_bound"} if "all of space" in name else set()
        assert set(applying) <= {"kim2021_l2", "l2_tied_bound", "kim2021_dot_product"} | scores, name
        assert set(applying) >= scores
    assert [r["theorem"] for r in oa.theorems(MAPS["tied"], n=3).rows() if r["applies"]] == [
        "kim2021_l2",
        "l2_tied_bound",
    ]
