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


def test_the_number_of_microbatches_is_that_of_the_shortest_step():
    counts = (1, 2, 4, 8)
    times = [planned("mlp", batch=1 << 20, microbatches=count)[0].time for count in counts]
    plan, limits = planned("mlp", batch=1 << 20)
    assert plan.time <= min(times) and limits.microbatches >= 2


def test_larger_work_is_cut_where_small_work_is_not():
    assert len(planned("mlp", batch=16)[0].stages) == 1
    assert len(planned("mlp", batch=1 << 20)[0].stages) == 2


def test_stages_hold_less_than_the_memory():
    alone, _ = planned("mlp", 1, microbatches=1)
    plan, _ = planned("mlp", 4, microbatches=1, memory=0.6 * alone.memory)
    assert len(plan.stages) > 1 and plan.memory <= 0.6 * alone.memory


def test_a_border_is_explained_by_the_next_best():
    plan, _ = planned("unet", 3, batch=1 << 12, microbatches=8, schedule="1f1b")
    assert len(plan.borders) == len(plan.stages) - 1 > 0
    for border, stage in zip(plan.borders, plan.stages):
        assert border.behind == stage.ids[-1] and border.nbytes > 0
        assert border.next_best >= plan.time and border.instead != border.behind


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ({"memory": 1e5}, "the nearest needs .*; use --memory "),
        ({"batch": 8, "microbatches": 3}, "3 microbatches of 8 samples"),
        ({"ranks": 100}, r"the model has \d+ pieces .* for 100 ranks"),
    ],
)
def test_what_cannot_be_planned_is_refused(how, line):
    with pytest.raises(ValueError, match=line):
        planned(**how)


def test_a_batch_that_is_not_first_leaves_nothing_to_cut():
    with pytest.raises(ValueError, match="only values with the batch in dimension 0"):
        planned_module(captured(f"{HERE}:time_first"), MACHINE, Wanted(4))
