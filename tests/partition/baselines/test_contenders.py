"""Other methods on published loads, compared with known results."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Atom, Graph, Value
from hpc3d.partition.baselines.contenders import (
    Task,
    by_parameters,
    data_parallel,
    gpipe,
    gpipe_hybrid,
    layer_by_layer,
    pipedream,
    rank_of,
    torchgpipe,
)
from hpc3d.partition.evaluation import ModelCosts, PipelineChoice, StageChoice, evaluated
from tests.partition.graphs import LOADS
from tests.partition.test_evaluation import QUIET


def task(ranks=4, memory=1e9, parameters=(1.0,) * 8, batch=8):
    """Return layers with LOADS per row forward and 6 bytes, which save and send 1 byte per row."""

    def graph(rows):
        atoms = [
            Atom((f"layers.{n}/op",), load * rows, 2 * load * rows, 6.0, 1.0 * rows, held)
            for n, (load, held) in enumerate(zip(LOADS, parameters, strict=True))
        ]
        return Graph(atoms, [Value(n, (n + 1,), rows) for n in range(len(LOADS) - 1)])

    return Task(None, ModelCosts(graph, QUIET, batch), ranks, memory)


def ends(contender):
    return [stage.end for stage in contender.choice.stages]


def test_data_parallel_replicas_have_equal_shares():
    """A rank with 2 of 8 rows takes 60 s forward and 120 s backward."""
    found = data_parallel(task())
    assert found.choice.replicas == (4,) and found.step.seconds == 360


@pytest.mark.parametrize(
    ("contender", "cut", "seconds"),
    [(gpipe, [2, 4, 6, 8], 4 * (60 + 7 * 23)), (torchgpipe, [1, 4, 5, 8], 4 * (60 + 7 * 20))],
)
def test_gpipe_and_torchgpipe_cut_layers_into_stages(contender, cut, seconds):
    """With even layers, a stage takes 5 + 18 s; with the smallest maximum load, 5 + 4 + 11 s.
    Microbatches pass twice, and backward takes twice as long."""
    found = contender(task())
    assert ends(found) == cut and found.choice.microbatches == 8
    assert found.step.seconds == seconds and found.step.fits


def test_hybrid_selects_the_fastest_replicas_and_stages_that_fit():
    """There are two stages of 22 and 38 s; each replica has one of four rows of a microbatch. Half
    of the layers have 24 bytes, a quarter 12."""
    halves = gpipe_hybrid(task())
    assert halves.choice.replicas == (2, 2) and halves.step.seconds == 4 * (60 + 3 * 38)
    assert all(stage.recompute for stage in halves.choice.stages)
    assert gpipe_hybrid(task(memory=23.0)).choice.replicas == (1, 1, 1, 1)


def test_hybrid_that_does_not_fit_uses_the_least_memory():
    found = gpipe_hybrid(task(memory=5.0))
    assert not found.step.fits and len(found.choice.stages) == 4


def test_parameters_are_balanced_over_stages():
    """All 48 bytes do not fit; the first of two stages has one layer with half of the bytes."""
    found = by_parameters(task(2, 45.0, (7.0, 1, 1, 1, 1, 1, 1, 1)))
    assert ends(found) == [1, 8] and found.choice.schedule == "1f1b"


def test_pipedream_predicts_the_throughput_of_its_slowest_stage():
    """Four replicas reduce at no cost: 2 samples every 2 x 180 / 4 s."""
    found = pipedream(task())
    assert found.choice.replicas == (4,) and found.step.seconds == 360
    assert found.note.endswith("0.02222 samples/s")


def test_layerwise_recomputation_saves_one_layer_at_a_time():
    """A stage of 8 layers and 8 rows saves the inputs of 7 layers and 8 bytes, not 8 x 8."""
    costs = task().costs
    choice = PipelineChoice((StageChoice(8, 1, True),))
    whole, parts = (step(costs, choice, 1e9) for step in (evaluated, layer_by_layer))
    assert whole.held == (8 * 6 + 8 * 8,) and parts.held == (8 * 6 + 7 * 8 + 8,)
    assert not layer_by_layer(costs, choice, 111.0).fits
    kept = PipelineChoice((StageChoice(8),))
    assert layer_by_layer(costs, kept, 1e9) == evaluated(costs, kept, 1e9)


def test_microbatches_in_flight_save_the_layer_inputs():
    """There are four layers and two rows. The first stage saves three layer inputs for each of two
    microbatches, and the second stage, with one in flight, four. Each stage also has the
    activations of one layer; the first has the recomputed output and its gradient, and the second
    the gradient that it sends."""
    choice = PipelineChoice((StageChoice(4, 1, True), StageChoice(8, 1, True)), 4)
    found = layer_by_layer(task().costs, choice, 1e9)
    assert found.held == (4 * 6 + 2 * 3 * 2 + 2 + 2 * 2, 4 * 6 + 4 * 2 + 2 + 2)


def test_fitting_plan_ranks_above_one_with_less_memory():
    found = data_parallel(task())
    small = found.step._replace(fits=False, held=(0.0,))
    assert rank_of(found) < rank_of(found._replace(step=small))


def test_too_few_samples_have_no_arrangement():
    assert data_parallel(task(batch=3)).choice is None
