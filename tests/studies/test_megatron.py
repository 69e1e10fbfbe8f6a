"""Predictions of published Megatron-LM steps, which the machine file was not fitted to."""

from dataclasses import replace

import pytest

from hpc3d.predict.machine.machine_file import load
from hpc3d.studies.megatron import (
    LAYERS,
    RECOMPUTATION,
    SELENE,
    STATES,
    WEAK_SCALING,
    config_of,
    errors,
    facts,
    layers,
    predicted,
    rows,
    states,
    weak,
)


@pytest.fixture(scope="module")
def machine():
    return load(SELENE)


@pytest.fixture(scope="module")
def recomputation(machine):
    return rows(RECOMPUTATION, machine)


@pytest.mark.slow
def test_steps_of_arxiv_2205_05198_are_within_10_percent(recomputation):
    assert [row["published_s"] for row in recomputation] == [1.42, 1.10, 18.13, 13.75]
    found = errors(recomputation)
    assert found["mean"] <= 0.05
    assert found["worst"] <= 0.10


@pytest.mark.slow
def test_gain_of_sequence_parallelism_and_selective_recomputation(recomputation):
    """The published speedups are 1.29 and 1.32."""
    for full, selective in zip(recomputation[::2], recomputation[1::2], strict=True):
        gain, published = (full[key] / selective[key] for key in ("predicted_s", "published_s"))
        assert gain == pytest.approx(published, rel=0.06)


def test_layer_times_of_arxiv_2205_05198_are_within_10_percent(machine):
    """Forward plus backward times are within 5 % on average."""
    found = layers(machine)
    ratios = [sum(row["predicted_ms"]) / sum(row["published_ms"]) for row in found]
    assert len(ratios) == len(LAYERS)
    assert sum(abs(ratio - 1) for ratio in ratios) / len(ratios) <= 0.05
    assert max(abs(ratio - 1) for ratio in ratios) <= 0.10


def test_parameter_and_optimizer_memory_is_within_2_percent():
    """The published values are 18 bytes for each of 12 L h^2 / n parameters."""
    found = states()
    for row, (_, count, hidden, _, p, published) in zip(found, STATES, strict=True):
        assert 18 * 12 * count * hidden**2 / (8 * p) / 2**30 == published
        assert abs(row["error"]) <= 0.02
        assert row["with_tables_GiB"] > row["predicted_GiB"]


def test_published_flop_rates_convert_to_seconds():
    """Equation 3 of 2104.04473, for its largest model: 502 PFLOP/s of 3,072 GPUs, 102.6 s."""
    row = weak(WEAK_SCALING[-1])
    assert row.seconds == pytest.approx(102.63, abs=0.01)
    config = config_of(row)
    assert (config.mesh.p, config.mesh.d, config.parallel.microbatches) == (64, 6, 512)


@pytest.mark.slow
def test_smaller_steps_of_sc21_are_within_10_percent(machine):
    found = rows([weak(values) for values in WEAK_SCALING[:4]], machine)
    assert errors(found)["mean"] <= 0.10
    assert errors(found)["worst"] <= 0.10


@pytest.mark.slow
def test_each_machine_parameter_affects_the_step_time(machine):
    """Without a parameter, the step time of 22B changes; without all, the error is large."""
    found = facts(machine)
    everything = found.pop("with all")
    assert len(found) == len(machine.kernels) + 2
    assert all(without != everything for without in found.values())
    assert found["kernels"][1] < -0.10


def test_slower_machine_exceeds_the_error_bound(machine):
    """Other machines exceed the bound, such as one with products at 80 % of their rate."""
    rates = machine.gemm["float16"]
    slow = replace(rates, rate=tuple(0.8 * rate for rate in rates.rate))
    found = rows(RECOMPUTATION[:2], replace(machine, gemm={"float16": slow}))
    assert errors(found)["worst"] > 0.10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_steps_of_sc21_are_within_10_percent(machine):
    found = [predicted(weak(values), machine) for values in WEAK_SCALING]
    assert errors(found)["mean"] <= 0.10
    assert errors(found)["worst"] <= 0.15
