"""Techniques if nothing fits: their order, which ones help, and which ones are exact."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.config.load import load
from hpc3d.predict.planning.resorts import RESORTS, fallback_layouts
from hpc3d.predict.planning.search import Search
from hpc3d.predict.simulation.simulator import simulate
from tests.pipeline.mixes import config_of, train
from tests.predict.fixed import MACHINE
from tests.strided import strided

SIZES = {
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.sequence": 64,
    "model.vocabulary": 64,
    "train.batch": 16,
}
WORDS = [word for key, value in SIZES.items() for word in (f"--{key}", str(value))]


def searched(memory):
    """Return a search on two ranks with limited memory, and its results."""
    search = Search(load(None, WORDS), 2, 64, MACHINE, memory)
    return search, search.run(10, 500)


@pytest.fixture(scope="module")
def least():
    """Return the bytes of the layout that is nearest to fitting in almost no memory."""
    _, found = searched(1e4)
    return min(each.best.peak for each in found.timed)


def test_exact_techniques_come_first():
    exact = [resort.exact for resort in RESORTS]
    assert exact == sorted(exact, reverse=True)


@pytest.mark.slow
def test_techniques_that_help_are_found_and_fit_in_simulation(least):
    search, found = searched(0.8 * least)
    assert not any(each.fits for each in found.timed)
    fitting = [each for each in fallback_layouts(None, WORDS, search, found) if each.fits]
    names = [fit.resort.text for fit in fitting]
    assert names == [resort.text for resort in RESORTS if resort.text in names]
    assert "train.optimizer=adafactor" in names and "parallel.keep_dtype=int8" not in names
    for fit in fitting:
        config = fit.estimate.config
        for key, value in fit.resort.changes:
            table, name = key.split(".")
            found_value = getattr(getattr(config, table), name)
            assert found_value == getattr(getattr(load(None, [f"--{key}", value]), table), name)
        peak = max(each.peak["all"] for each in simulate(config, 64, MACHINE))
        assert fit.estimate.peak == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
def test_techniques_that_the_rules_reject_are_omitted(least):
    """SGD has almost no states that could be offloaded."""
    search, found = searched(0.8 * least)
    words = [*WORDS, "--train.optimizer", "sgd"]
    texts = [fit.resort.text for fit in fallback_layouts(None, words, search, found)]
    assert not [text for text in texts if text.startswith('parallel.offload=["optimizer"')]


EXACT = [(each,) for each in RESORTS if each.exact]


@pytest.mark.parametrize("resort", strided(EXACT, 4, ids=lambda case: case[0].text))
def test_exact_technique_changes_no_bit(resort):
    line = "d=2 schedule=none microbatches=2"
    plain, other = (
        run({"d": 2}, lambda mesh, line=line: train(mesh, config_of(line)))
        for line in (line, f"{line} '{resort.text.removeprefix('parallel.')}'")
    )
    for ours, theirs in zip(other, plain, strict=True):
        assert ours.totals == theirs.totals
        for name, (_, block) in theirs.weights.items():
            np.testing.assert_array_equal(ours.weights[name][1], block)
