"""RaNNC's experiments: results of points, and the claims that hold for them."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.studies import rannc_experiments
from hpc3d.studies.rannc_experiments import Setting, claims

NAMES = "ours", "RaNNC", "Megatron-LM", "Megatron-LM, pipeline", "GPipe hybrid"


def point(billions, rates, names=NAMES):
    """Return samples/s by planner; None means that the model does not fit."""
    rows = {
        name: {"fits": rate is not None, "samples_s": rate} for name, rate in zip(names, rates)
    }
    return {"model": f"bert:{billions}", "ranks": 32, "billions": billions, "rows": rows}


SMALL = point(1.0, (12, 10, 10, 11, 8))
LARGE = point(5.0, (3, 2, None, 2.5, 1.5))


def test_all_claims_hold_on_favorable_points():
    found = claims([SMALL, LARGE], [])
    assert (
        "holds; 5.000 against 1.000 x 10^9 parameters, at least 5.0 times"
        in found["five times larger"]
    )
    assert "does not hold; 5.000 against 5.000" in found["than with a pipeline"]
    assert "holds; 1.00 to 1.00" in found["comparable"] and "on 1 models" in found["comparable"]
    assert 'settings": holds; 1.25 to 1.33' in found["better than GPipe"]
    assert 'settings": holds; 1.09 to 1.20' in found["ours"]


def test_no_claim_holds_for_a_slower_rannc():
    """RaNNC is slower and fits only models that Megatron-LM fits; GPipe trains them too."""
    other = point(2.0, (4, 5, 9, None, 6))
    found = claims([point(1.0, (8, 5, 9, None, 4)), other], [])
    assert "does not hold; 2.000 against 2.000" in found["five times larger"]
    assert "none of its plans fits in memory" in found["than with a pipeline"]
    assert "does not hold; 0.56 to 0.56" in found["comparable"]
    assert found["better than GPipe"].endswith("in 2 settings, slower for bert:2.0 on 32")
    assert "slower for bert:1.0 on 32, bert:2.0 on 32" in found["ours"]


def test_claims_are_undecided_if_models_are_too_small():
    """RaNNC trains all models, and Megatron-LM all but the largest; then no planner trains it."""
    middle, none = point(3.0, (3, 2, None, None, None)), point(9.0, (1, None, None, None, None))
    found = claims([SMALL, middle], [])["five times larger"]
    assert "not decided; 3.000 against 1.000" in found and "at least 3.0 times" in found
    found = claims([SMALL, middle, none], [])["five times larger"]
    assert "does not hold; 3.000 against 1.000" in found and "least" not in found


def test_best_gpipe_variant_is_compared():
    names = "ours", "RaNNC", "GPipe, even layers", "GPipe, by time"
    found = claims([SMALL], [point(1.5, (9, 6, 3, 8), names)])
    assert "does not hold; 0.75 to 1.25" in found["better than GPipe"]


def test_claim_without_comparable_models_is_reported():
    found = claims([point(1.0, (1, None, None, None, None))], [])
    assert "no model can be trained by both planners" in found["comparable"]


@pytest.mark.slow
def test_small_models_produce_a_table(monkeypatch, capsys):
    settings = [Setting("inputs.partition.mlp:small", 1024, ranks) for ranks in (1, 4)]
    monkeypatch.setattr(rannc_experiments, "_QUICK", {"bert": settings, "resnet": settings[:1]})
    found = rannc_experiments.main(SimpleNamespace(machine=None, quick=True))
    assert [row["ranks"] for row in found["bert"]] == [1, 4] and len(found["resnet"]) == 1
    first = found["bert"][0]
    assert first["billions"] == pytest.approx(6 * (64 * 64 + 64) / 1e9)
    assert first["rows"]["ours"]["step"] == pytest.approx(first["rows"]["RaNNC"]["step"])
    assert not first["rows"]["GPipe hybrid"]["fits"]
    text = capsys.readouterr().out
    assert text.count("mlp:small") == 3 and found["claims"]["ours"] in text
    assert f"{first['rows']['ours']['samples_s']:.4g}" in text
