"""From a module to a plan: what is searched, and what is refused."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.partition.module_plan import Wanted, planned_module
from hpc3d.predict.machine import machine_file
from hpc3d.shipped import shipped
from tests.partition.sample_models import HERE, captured, small

MACHINE = machine_file.load(shipped("machines/v100-4x16.toml"))


def planned(name="bert", ranks=2, **how):
    return planned_module(small(name), MACHINE, Wanted(ranks, **how))


def test_replicas_and_microbatches_are_those_of_the_shortest_step():
    ways = [(replicas, micros) for replicas in (1, 2, 4) for micros in (1, 2, 4, 8)]
    times = {
        way: planned("mlp", 4, batch=1 << 16, replicas=way[0], microbatches=way[1]).stages.time
        for way in ways
    }
    found = planned("mlp", 4, batch=1 << 16)
    assert found.stages.time == min(times.values())


def test_a_model_is_cut_where_a_rank_has_no_room_for_it():
    """Parameters with gradients and moments, of which replicas have all."""
    whole, least = planned("mlp", 4, batch=64), 4 * 6 * (64 * 64 + 64) * 4
    assert len(whole.stages.stages) == 1 and whole.stages.memory > least
    cut = planned("mlp", 4, batch=64, memory=0.9 * least)
    assert len(cut.stages.stages) > 1 and cut.stages.memory <= 0.9 * least


def test_a_stage_keeps_what_it_received():
    """A perceptron that has room for 4 of 6 layers: Linear and GELU both keep what they read, the
    first stage also what it sends."""
    layer, array = 4 * (64 * 64 + 64) * 4, 16 * 64 * 4
    cut = planned("mlp", 2, batch=16, replicas=1, microbatches=1, memory=4.5 * layer)
    first, last = cut.stages.stages
    assert first.held == len(first.ids) / 2 * layer + (len(first.ids) + 1) * array
    assert last.held == len(last.ids) / 2 * layer + len(last.ids) * array


def test_sums_of_gradients_end_the_step():
    """On 2 ranks with all of the model: the passes of half of the batch, and one sum."""
    half = planned("mlp", 1, batch=1 << 9, microbatches=1).stages.time
    both = planned("mlp", 2, batch=1 << 10, replicas=2, microbatches=1).stages.time
    parameters = 6 * (64 * 64 + 64) * 4
    assert both - half == pytest.approx(MACHINE.call("all_reduce", parameters, range(2)), rel=0.1)


def test_a_border_is_explained_by_the_next_best():
    plan = planned("unet", 3, batch=1 << 12, replicas=1, microbatches=8, schedule="1f1b").stages
    assert len(plan.borders) == len(plan.stages) - 1 > 0
    for border, stage in zip(plan.borders, plan.stages):
        assert border.behind == stage.ids[-1] and border.nbytes > 0
        assert border.next_best >= plan.time and border.instead != border.behind


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"memory": 1e5}, "the nearest needs .*; use --memory "),
        ({"batch": 8, "microbatches": 3}, "3 microbatches cannot share 8 samples"),
        ({"batch": 9, "replicas": 2}, "2 replicas cannot share 9 samples"),
        ({"replicas": 4}, "--replicas 4 does not divide 2 ranks"),
        ({"ranks": 100, "replicas": 1}, r"of 100 stages: it has \d+"),
    ],
)
def test_what_cannot_be_planned_is_refused(how, line):
    with pytest.raises(ValueError, match=line):
        planned(**how)


def test_a_batch_that_is_not_first_leaves_nothing_to_cut():
    with pytest.raises(ValueError, match="the batch crosses in dimension 0"):
        planned_module(captured(f"{HERE}:time_first"), MACHINE, Wanted(4, replicas=1))
