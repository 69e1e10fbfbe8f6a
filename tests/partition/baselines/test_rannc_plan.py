"""RaNNC's plans: the plans in its README, and plans of parallel chains."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("networkx")

from hpc3d.config.package_data import shipped
from hpc3d.partition.atom_graph import Atom, Graph, Value
from hpc3d.partition.baselines.contenders import Task
from hpc3d.partition.baselines.rannc_plan import rannc
from hpc3d.partition.capture import capture
from hpc3d.partition.evaluation import ModelCosts, evaluated
from hpc3d.partition.factory import made
from hpc3d.partition.operation_costs import Operations
from hpc3d.predict.machine import machine_file
from tests.partition.test_evaluation import QUIET

V100 = machine_file.load(shipped("machines/v100-8x4.toml"))


def task(graph_of, ranks, memory, batch=8):
    return Task(None, ModelCosts(graph_of, QUIET, batch), ranks, memory)


def branches(rows):
    """Two chains of four atoms that take turns, and one atom that reads both; each atom holds 6
    bytes, and saves and hands on a byte a row."""
    atoms = [Atom((n,), (1 + n % 3) * rows, 2 * rows, 6.0, 1.0 * rows, 1.0) for n in range(9)]
    values = [Value(n, (min(n + 2, 8),), 1.0 * rows) for n in range(8)]
    return Graph(atoms, values)


def test_stages_of_branches_read_only_from_earlier_stages():
    """Six stages at least: what a microbatch has received counts, too; gradients that arrive do
    not by its own estimate, and the second stage needs three bytes more."""
    found = rannc(task(branches, 8, 26.0))
    ends = [stage.end for stage in found.choice.stages]
    assert max(found.step.held) == 29 and ends == sorted({*ends}) and ends[-1] == 9
    assert found.choice.ranks == 8


def twins(rows):
    """Two chains that take turns, of light and heavy pairs; one of them hands on twice as much."""
    loads = [(0.2, 0.2, 2.0, 2.0)[n % 4] * rows for n in range(12)]
    atoms = [Atom((n,), load, 0.0, 6.0, 1.0 * rows, 1.0) for n, load in enumerate(loads)]
    return Graph(atoms, [Value(n, (n + 2,), (1.0 + n % 2) * rows) for n in range(10)])


def test_rannc_may_interleave_parallel_chains():
    """Pairs of one chain and the other in turn, a stage each: of two rows, or of one where two
    replicas send to two, cross a value of the first, of both, ... of the second."""
    found = rannc(task(twins, 8, 26.0))
    assert found.choice.replicas == (1, 1, 2, 2, 1, 1) and found.choice.microbatches == 4
    assert found.step.sent == (2, 6, 3, 6, 4)


def test_activations_in_host_memory_do_not_count():
    """Of eight microbatches of one row two are on the device: six bytes less on the second."""

    def chain(rows):
        atoms = [Atom((n,), 1.0 * rows, 2.0 * rows, 6.0, 1.0 * rows, 1.0) for n in range(2)]
        return Graph(atoms, [Value(0, (1,), 1.0 * rows)])

    given = task(chain, 2, 9.0)
    found = rannc(given)
    assert found.choice.microbatches == 8 and len(found.choice.stages) == 2
    held = evaluated(given.costs, found.choice).held
    assert found.step.held == (held[0], held[1] - 6) == (9.0, 9.0)


def test_no_partition_fits():
    found = rannc(task(branches, 2, 7.0))
    assert found.choice is None and "no partition that fits" in found.note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "batch", "replicas"),
    [
        ("bert:hidden_2048_layers_96", 64, (2, 2, 2, 2)),
        ("resnet:resnet152_x8", 128, (16, 8, 8)),
    ],
)
def test_rannc_finds_the_published_plans(model, batch, replicas):
    """On 8 and 32 V100 of 32 GB (rannc-examples)."""
    operations = Operations(capture(*made(f"inputs.partition.{model}")))
    found = rannc(Task.of(operations, V100, batch, sum(replicas), 0.9 * 32e9))
    assert found.choice.replicas == replicas and found.step.fits
