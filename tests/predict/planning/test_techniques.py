"""Savings and costs of techniques: closed forms, and techniques that a layout excludes."""

from dataclasses import replace

import pytest

from hpc3d.predict.planning.techniques import TECHNIQUES, effects
from tests.predict.fixed import MACHINE

SIZES = {
    "mesh.d": 2,
    "model.layers": 4,
    "model.hidden": 48,
    "model.heads": 12,
    "model.sequence": 16,
    "model.vocabulary": 40,
    "train.batch": 24,
}
WORDS = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def found():
    rows = [*effects(None, [*WORDS, "--parallel.microbatches", "2"], 2, MACHINE)]
    return {row.change: row for row in rows}


@pytest.mark.slow
def test_every_technique_has_a_row(found):
    changes = ["as it is", *(f"{key}={value}" for key, value in TECHNIQUES)]
    assert [*found] == changes


@pytest.mark.slow
def test_orthogonalize_row_appears_only_for_muon():
    muon = ["--train.optimizer", "muon"]
    (row,) = (
        row
        for row in effects(None, [*WORDS, *muon, "--mesh.x", "2"], 4, MACHINE)
        if "orth" in row.change
    )
    assert row.change == "train.orthogonalize=sharded" and not row.refused


def test_technique_effects_match_the_closed_forms(found):
    base = found["as it is"]
    replicas, psi = 2, base.memory["parameter"] // 4
    assert base.received == pytest.approx(2 * (1 - 1 / replicas) * 4 * psi, rel=0.01)

    state = found["parallel.zero=1"].memory["optimizer"]
    assert state == pytest.approx(base.memory["optimizer"] / replicas, rel=0.01)
    assert found["parallel.zero=1"].received == base.received
    assert found["parallel.zero=2"].memory["gradient"] < 0.7 * base.memory["gradient"]
    assert found["parallel.zero=3"].memory["parameter"] < 0.7 * base.memory["parameter"]
    assert found["parallel.zero=3"].received > 1.4 * base.received
    assert found["train.optimizer=sgd"].memory["optimizer"] == 0
    adafactor = found["train.optimizer=adafactor"].memory["optimizer"]
    assert adafactor < 0.05 * base.memory["optimizer"]
    for change in ("parallel.compression=powersgd", "parallel.compression=top-k"):
        assert found[change].received < 0.5 * base.received
        assert found[change].memory["optimizer"] > base.memory["optimizer"]

    kept = ["parallel.keep_dtype=int8", "parallel.keep_dtype=bfloat16", "as it is"]
    peaks = [found[change].memory["all"] for change in kept]
    assert peaks == sorted({*peaks})
    assert found["parallel.recompute=full"].memory["all"] < base.memory["all"]
    for modules in '["layernorm"]', '["mlp_act"]', '["mlp"]':
        assert found[f"parallel.recompute={modules}"].memory["all"] < base.memory["all"]
    assert found["parallel.recompute=full"].seconds > base.seconds


@pytest.mark.slow
def test_rejected_techniques_state_the_reason_and_active_ones_are_omitted():
    machine = replace(MACHINE, gemm={"float16": MACHINE.gemm["float32"]})
    words = [*WORDS, "--train.dtype", "float16", "--train.backend", "cupy"]
    words += ["--parallel.recompute", "full"]
    rows = {row.change: row for row in effects(None, words, 2, machine)}
    assert "float16" in rows["parallel.keep_dtype=bfloat16"].refused
    assert "parallel.recompute=full" not in rows
