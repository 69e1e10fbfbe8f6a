"""Weights that several stages have."""

import numpy as np
import pytest

pytest.importorskip("torch")

from hpc3d.comm.threads import run_stages
from hpc3d.model.parameters import Parameters
from hpc3d.partition.execution.tied_weights import TiedBuckets, lines_of_owners, owners_of
from hpc3d.tensor.layout import Layout
from tests.partition.execution.modules import HERE, assert_trained_alike, trained, trained_by_torch

OWNERS = owners_of([["a", "b", "a"], ["c"], ["b", "c", "d"]])


def test_owners_are_the_stages_with_a_weight():
    assert OWNERS == {"a": (0,), "b": (0, 2), "c": (1, 2), "d": (2,)}


@pytest.mark.parametrize("zero", [0, 1])
def test_tied_gradients_are_summed_over_all_owners(zero):
    """b on ranks 0 and 3, 4; c on 1, 2 and 3, 4: each brings its rank, 1 to 5."""
    replicas, size = (1, 2, 2), 3

    def rank(mesh, line):
        stage = mesh.coord("p")
        parameters = Parameters(mesh, "float64", zero)
        items = {
            name: parameters.add(name, (size,), Layout(""), completed_last=True)
            for name, stages in OWNERS.items()
            if len(stages) > 1 and stage in stages
        }
        parameters.allocate(seed=0)
        lines = lines_of_owners(OWNERS, replicas, stage, line)
        shared = [
            (comm, [items[name] for name in items if OWNERS[name] == stages])
            for stages, comm in lines.items()
        ]
        buckets = TiedBuckets(parameters, 1e6, shared)
        for item in items.values():
            item.grad += mesh.rank + 1
        buckets.wait()
        return {name: item.grad.tolist() for name, item in items.items()}

    b, c = [1.0 + 4 + 5] * size, [2.0 + 3 + 4 + 5] * size
    assert run_stages(replicas, 4, rank) == [{"b": b}, {"c": c}, {"c": c}] + 2 * [{"b": b, "c": c}]


def test_gradient_norm_counts_a_tied_weight_once():
    """`everything` is clipped: a table that counted twice would be clipped to another norm."""
    name = f"{HERE}:everything"
    found = trained(name, (1, 1, 1), 2, "1f1b", zero=0)
    assert_trained_alike(found, trained_by_torch(name, 2))
    owners = [ours for ours, _ in found if "table.weight" in ours]
    assert len(owners) == 2
    np.testing.assert_array_equal(*(ours["table.weight"] for ours in owners))
