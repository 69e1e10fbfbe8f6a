"""Router decisions are recorded once per token, on any mesh, with any number of microbatches, and
with recomputed passes and evaluations."""

import numpy as np
import pytest

from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.router_sums import RouterSums
from hpc3d.trace.segment import read_segment, segment_path
from tests.analyze import traces
from tests.trace.recording import end_step, recorded

CHOSEN, KEPT = np.array([3, 0, 1]), np.array([2, 0, 1])


def test_microbatch_sums_restart_at_0_every_step():
    sums = RouterSums()
    for layer in (3, 1, 3):
        sums.add(layer, CHOSEN, KEPT, 0.5 * layer, 0.25)
    experts, routers = sums.take(7, 2)
    assert experts[:3] == [(7, 2, 1, 0, 3, 2), (7, 2, 1, 1, 0, 0), (7, 2, 1, 2, 1, 1)]
    assert [row[4:] for row in experts[3:]] == [(6, 4), (0, 0), (2, 2)]
    assert routers == [(7, 2, 1, 0.5, 0.25), (7, 2, 3, 3.0, 0.5)]
    sums.add(1, CHOSEN, KEPT, 1.0, 2.0)
    experts, routers = sums.take(7, 3)
    assert experts[0] == (7, 3, 1, 0, 3, 2) and routers[0] == (7, 3, 1, 1.0, 2.0)
    assert CHOSEN.tolist() == [3, 0, 1], "the arrays that come in are not written"


def test_recomputed_pass_adds_no_router_counts(recorder, tmp_path):
    for number in range(2):
        recorder.begin_step(number)
        for phase in ("forward", "recompute"):
            with recorder.scope(4, phase):
                recorder.routed(CHOSEN, KEPT, (1.5, 0.5))
        end_step(recorder)
    found = recorded(recorder)
    assert found.routers.tolist() == [(3, number, 4, 1.5, 0.5) for number in range(2)]
    assert found.experts["chosen"].tolist() == 2 * [3, 0, 1]
    recorder.flush()
    later = read_segment(segment_path(tmp_path, 3, 1), 3)
    assert len(later.experts) == len(later.routers) == 0


MODEL = {
    **{"model__experts": 4, "model__top_k": 2, "model__capacity": 0, "model__moe_every": 2},
    **{"model__layers": 4, "train__dtype": "float64"},
}
DROPS = {"model__capacity": 0.75}  # ranks along c would drop other tokens than one rank
LAYOUTS = {
    "cube": {"mesh__e": 2, "mesh__x": 2, "mesh__z": 2, "parallel__microbatches": 3, **DROPS},
    "replicas": {"mesh__e": 2, "mesh__x": 2, "parallel__scheme": "1d", **DROPS},
    "again": {"mesh__e": 2, "mesh__d": 2, "parallel__recompute": "full", **DROPS},
    "chunks": {"mesh__e": 2, "mesh__c": 2, "parallel__microbatches": 2},
    "stages": {"mesh__p": 2, "mesh__e": 2, "parallel__microbatches": 4, **DROPS},
}


def decided(folder, ranks, evaluate=False, **layout):
    """Return (chosen, kept) [steps, layers, experts] and both losses [steps, layers]."""
    with traces.opened(traces.trained(folder, ranks, evaluate, **(MODEL | layout))) as trace:
        assert violations(trace) == []
        experts, routers = trace.experts, trace.routers
        assert {*experts["layer"].tolist()} == {*routers["layer"].tolist()} == {1, 3}
        assert {*experts["expert"].tolist()} == {*range(4)}
        where = experts["step"], experts["layer"] // 2, experts["expert"]
        counts = np.zeros((2, traces.STEPS, 2, 4), int)
        for total, name in zip(counts, ("chosen", "kept")):
            np.add.at(total, where, experts[name])
        losses = np.zeros((2, traces.STEPS, 2))
        for total, name in zip(losses, ("balance_loss", "z_loss")):
            np.add.at(total, (routers["step"], routers["layer"] // 2), routers[name])
    return counts, losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the decisions of one rank without and with a capacity that drops tokens."""
    folder = tmp_path_factory.mktemp("alone")
    return decided(folder / "all", 1), decided(folder / "some", 1, **DROPS)


def test_every_choice_is_counted(alone):
    (chosen, kept), losses = alone[True]
    tokens = traces.TINY["train.batch"] * traces.TINY["model.sequence"]
    assert (chosen.sum(2) == 2 * tokens).all()
    slots = 2 * traces.TINY["train.batch"]  # ceil(2 x 4 x 0.75 / 4) of each expert a sequence
    assert (kept <= slots).all() and 0 < kept.sum() < chosen.sum()
    assert (losses > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_replicated_router_decisions_count_once(name, alone, tmp_path):
    layout = LAYOUTS[name]
    ranks = int(np.prod([size for key, size in layout.items() if key.startswith("mesh")]))
    counts, losses = decided(tmp_path / "run", ranks, True, **layout)
    expected, sums = alone["model__capacity" in layout]
    np.testing.assert_array_equal(counts, expected)
    np.testing.assert_allclose(losses, sums, rtol=1e-9)
