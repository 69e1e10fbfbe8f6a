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
    """Return two alternating chains of four atoms, and one atom that reads both. Each atom has 6
    bytes, and saves and sends one byte per row."""
    atoms = [Atom((n,), (1 + n % 3) * rows, 2 * rows, 6.0, 1.0 * rows, 1.0) for n in range(9)]
    values = [Value(n, (min(n + 2, 8),), 1.0 * rows) for n in range(8)]
    return Graph(atoms, values)


def test_stages_of_branches_read_only_from_earlier_stages():
    """At least six stages are required, because received inputs count. RaNNC's estimate omits
    received gradients, so the second stage needs three bytes more."""
    found = rannc(task(branches, 8, 26.0))
    ends = [stage.end for stage in found.choice.stages]
    assert max(found.step.held) == 29 and ends == sorted({*ends}) and ends[-1] == 9
    assert found.choice.ranks == 8


def twins(rows):
    """Return two alternating chains of light and heavy pairs; one chain sends twice as much."""
    loads = [(0.2, 0.2, 2.0, 2.0)[n % 4] * rows for n in range(12)]
    atoms = [Atom((n,), load, 0.0, 6.0, 1.0 * rows, 1.0) for n, load in enumerate(loads)]
    return Graph(atoms, [Value(n, (n + 2,), (1.0 + n % 2) * rows) for n in range(10)])


def test_rannc_may_interleave_parallel_chains():
    """Each stage has a pair of one chain or the other, alternately. With two rows, or with one row
    from two replicas to two, the boundaries are crossed by values of the first, of both, ... of
    the second."""
    found = rannc(task(twins, 8, 26.0))
    assert found.choice.replicas == (1, 1, 2, 2, 1, 1) and found.choice.microbatches == 4
    assert found.step.sent == (2, 6, 3, 6, 4)


def test_activations_in_host_memory_do_not_count():
    """Two of eight microbatches of one row are on the device: six bytes less on stage 2."""

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
    """The plans are for 8 and 32 V100 with 32 GB (rannc-examples)."""
    operations = Operations(capture(*made(f"inputs.partition.{model}")))
    found = rannc(Task.of(operations, V100, batch, sum(replicas), 0.9 * 32e9))
    assert found.choice.replicas == replicas and found.step.fits
