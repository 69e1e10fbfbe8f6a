"""Evaluation of arrangements of a model on a pipeline, compared with known values."""

from dataclasses import replace

import pytest

pytest.importorskip("networkx")

from hpc3d.partition.atom_graph import Atom, Graph, Shared, Value
from hpc3d.partition.evaluation import (
    Limits,
    ModelCosts,
    PipelineChoice,
    RunCosts,
    StageChoice,
    evaluated,
    held,
    load,
)
from hpc3d.predict.machine.machine import Link
from tests.partition.arrangements import MACHINE
from tests.partition.graphs import LOADS, chain

QUIET = replace(MACHINE, links=(Link(0, 0.0, 1e30),))


def costs(loads=(1, 1, 1, 1), machine=MACHINE, batch=4, shared=(), nbytes=3.0, run=None):
    """Return atoms with 10 bytes of parameters and 2 bytes of working memory."""

    def graph(rows):
        atoms = [
            Atom((n,), load * rows, 2 * load * rows, 40.0, 5.0 * rows, 10.0, load * rows, 2.0)
            for n, load in enumerate(loads)
        ]
        links = [Value(n, (n + 1,), nbytes * rows) for n in range(len(loads) - 1)]
        return Graph(atoms, links, shared)

    return ModelCosts(graph, machine, batch, run)


def choice(*stages, micros=1, **how):
    return PipelineChoice(tuple(StageChoice(*stage) for stage in stages), micros, **how)


@pytest.mark.parametrize(("schedule", "expected"), [("1f1b", 573), ("gpipe", 621)])
def test_step_time_matches_the_schedule(schedule, expected):
    """Uses the partition of the published loads that is the best only with 1F1B."""
    quiet = costs(LOADS, QUIET, batch=8)
    stages = choice((3,), (5,), (6,), (8,), micros=8, schedule=schedule)
    assert evaluated(quiet, stages).seconds == expected


def test_replicas_share_rows_and_reduce_gradients():
    """Each replica has 2 of 4 rows, and receives 20 bytes in the all-reduce of 20 bytes."""
    found = evaluated(costs((1, 1)), choice((2, 2)))
    assert found.forward == (4.0,) and found.backward == (8.0,)
    sums = MACHINE.call("all_reduce", 20, range(2))
    assert found.sums == (sums,) and found.seconds == 12 + sums
    fullest = evaluated(costs((1, 1), batch=5), choice((2, 2)))
    assert fullest.forward == (6.0,)


def test_three_replicas_receive_four_thirds_of_the_gradient_bytes():
    found = evaluated(costs((1, 1), batch=3), choice((2, 3)))
    assert found.sums == pytest.approx((MACHINE.call("all_reduce", 4 / 3 * 20, range(3)),))


@pytest.mark.parametrize(
    ("replicas", "nbytes", "peers"),
    [((1, 1), 12, 1), ((2, 2), 6, 1), ((2, 1), 12, 2), ((1, 4), 12, 4), ((3, 2), 6, 2)],
)
def test_messages_between_unequal_replicas(replicas, nbytes, peers):
    """With 3 bytes per row, the stage with fewer ranks moves most, to or from several ranks."""
    found = evaluated(costs(), choice((2, replicas[0]), (4, replicas[1])))
    latency, second = (1.0, 10.0) if sum(replicas) <= 2 else (2.0, 1.0)
    assert found.sent == (nbytes,)
    assert found.messages == (pytest.approx(peers * latency + nbytes / second),)


@pytest.mark.parametrize(
    ("schedule", "flights"), [("1f1b", (2, 1)), ("gpipe", (4, 4)), ("zb-h1", (2, 2))]
)
def test_memory_counts_activations_in_flight(schedule, flights):
    """Weights, gradients and moments; 5 bytes per saved row and atom, 3 per received row; 2 bytes
    of working memory, and the gradient of sent rows; one in transit if more microbatches
    follow."""
    stages = choice((1,), (4,), micros=4, schedule=schedule)
    found = evaluated(costs(), stages)
    assert found.in_flight == flights
    sending = 3 * (flights[1] < 4)
    assert found.held == (40 + 5 * flights[0] + 2 + 3, 120 + 18 * flights[1] + 2 + sending)


def test_recomputation_saves_only_received_inputs():
    kept = evaluated(costs(), choice((1, 1, True), (4, 1, True), micros=4, schedule="gpipe"))
    assert kept.held == (40 + 5 + 2 + 2 * 3, 120 + 4 * 3 + 15 + 2)
    assert kept.forward == (1.0, 3.0) and kept.backward == (3.0, 9.0)


def test_interleaved_chunks_are_in_flight_together():
    """Stage 0 runs chunk 0 of two microbatches, chunk 1 of both, then chunk 0 of a third."""
    found = evaluated(
        costs(batch=4), choice((1,), (2,), (3,), (4,), micros=4, schedule="interleaved", chunks=2)
    )
    assert found.in_flight == (5, 3)
    assert found.held[0] == 80 + 3 * 5 + 2 * 8 + 2 + 2 * 3


def test_zero_1_shards_the_optimizer_moments():
    """40 of 80 bytes are moments."""
    held = [evaluated(costs((1, 1)), choice((2, 2), zero=zero)).held[0] for zero in (0, 1)]
    assert held[0] - held[1] == 20


def test_tied_weight_counts_once_per_stage_and_is_reduced_over_its_stages():
    tied = (Shared((0, 1, 3), 40.0, 10.0),)
    one = evaluated(costs(shared=tied), choice((4,)))
    assert one.held == (160 - 80 + 4 * 20 + 2,) and one.sums == (0.0,)
    two = evaluated(costs(shared=tied), choice((2, 1), (4, 2)))
    alone = MACHINE.call("all_reduce", 10, range(1, 3))
    over_all = MACHINE.call("all_reduce", 2 * 2 / 3 * 10, (0, 1, 2))
    assert two.held[0] == 80 - 40 + 4 * 10 + 2 + 4 * 3
    assert two.sums == pytest.approx((over_all, alone + over_all))


def test_tied_weight_in_two_chunks_of_a_stage_counts_once():
    tied = (Shared((0, 2), 40.0, 10.0),)
    stages = choice((1, 2), (2, 1), (3, 2), (4, 1), micros=2, schedule="interleaved", chunks=2)
    alone, once = (evaluated(costs(shared=shared), stages) for shared in ((), tied))
    assert alone.held[0] - once.held[0] == 40 and alone.held[1] == once.held[1]
    sums = [MACHINE.call("all_reduce", nbytes, range(2)) for nbytes in (20, 10)]
    assert [alone.sums[0], once.sums[0]] == sums


def test_split_backward_delays_weight_gradients():
    """Four times 2 + 2 + 2 s, and a bubble of F + B + W or of F + B - W."""
    seconds = {
        name: evaluated(costs(machine=QUIET), choice((2,), (4,), micros=4, schedule=name)).seconds
        for name in ("1f1b", "zb-h1")
    }
    assert seconds == {"1f1b": 5 * 6, "zb-h1": 4 * 6 + 2}


def test_overheads_per_stage_and_per_step_are_added():
    """Two microbatches of 2 rows on two stages, of 5 and 1 atoms of 12 s; passes take an eighth
    more forward and a quarter more backward, and 10 bytes of each atom are updated."""
    run = RunCosts(0.125, 0.25, 1000.0, 2.0)
    stages = choice((5,), (6,), micros=2)
    plain, more = (evaluated(costs((1,) * 6, QUIET, run=each), stages) for each in (None, run))
    assert more.forward == (10.125, 2.125) and more.backward == (20.25, 4.25)
    assert plain.seconds == 2 * 30
    assert more.seconds == 2 * 30.375 + 1000 + 2 * 50
    again = [stage._replace(recompute=True) for stage in stages.stages]
    found = evaluated(costs((1,) * 6, QUIET, run=run), stages._replace(stages=tuple(again)))
    assert found.backward == (30.375, 6.375)


def test_tied_weight_is_updated_once_per_stage():
    run = RunCosts(update=1.0)
    tied = (Shared((0, 1, 3), 40.0, 10.0),)
    plain, more = (
        evaluated(costs(machine=QUIET, shared=tied, run=each), choice((2,), (4,))).seconds
        for each in (None, run)
    )
    assert more - plain == pytest.approx(20)


def test_plan_fits_exactly_at_its_memory_limit():
    stages = choice((1,), (4,), micros=4)
    assert evaluated(costs(), stages, 143).fits and not evaluated(costs(), stages, 142).fits


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (choice((2,), (2,), (4,)), "every stage must contain at least one atom"),
        (choice((3,)), "the last stage must end at 4"),
        (choice((4,), micros=5), "4 samples is too small for 5 microbatches"),
        (choice((4, 3), micros=2), "2 samples is too small for 3 replicas"),
        (choice((2,), (4,), chunks=4), "model chunks, 2, must be a multiple of .*, 4$"),
        (choice((2,), (4, 2), chunks=2), "the same number of replicas"),
    ],
)
def test_invalid_arrangement_is_rejected(wrong, line):
    with pytest.raises(ValueError, match=line):
        evaluated(costs(), wrong)


def test_load_counts_compute_and_boundary_bytes_once():
    graph = chain((2, 3, 5), nbytes=4.0)
    assert load(graph, 0b010, Limits(3)) == 9
    assert load(graph, 0b010, Limits(3, bandwidth=2.0)) == 9 + 4
    assert load(graph, 0b110, Limits(3, bandwidth=2.0)) == 24 + 2


def test_held_memory_grows_with_microbatches_in_flight():
    atoms = [atom._replace(memory=3.0, saved=2.0) for atom in chain((1, 1)).atoms]
    graph = type(chain())(atoms, [])
    assert held(graph, 0b01, 1) == 5 and held(graph, 0b11, 4) == 22
