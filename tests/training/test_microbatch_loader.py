"""The microbatches of a step, and their weights in the loss."""

from dataclasses import replace

import numpy as np

from hpc3d.arrays.pool import Pool
from hpc3d.comm.threads import run
from hpc3d.model.microbatch import DeviceCache, microbatches
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.pipeline.program import forward_program_of, program_of
from hpc3d.training.microbatch_loader import MicrobatchLoader
from tests.pipeline.test_program import STEPS, config


class Counting:
    """Batches in which sequence i of step s is filled with 100 s + i; some targets are ignored.

    `read` contains the steps in the order in which they were read.
    """

    def __init__(self):
        self.read = []

    def batch(self, step):
        self.read.append(step)
        tokens = np.repeat(100 * step + np.arange(6, dtype=np.int32)[:, None], 64, axis=1)
        targets = tokens.copy()
        targets[0, 1:] = IGNORE
        return tokens, targets


def fed(schedule, stages, micros, ranks=1):
    """Return {number: Micro} of every step for each rank, and the steps that rank 0 read."""
    settled = config(schedule, stages, micros, batch=6)
    plan, batches = program_of(settled), Counting()

    def rank(mesh):
        source = batches if mesh.rank == 0 else None
        feed = MicrobatchLoader(mesh, settled, source, plan)
        return [dict(feed.fetch(number)) for number in range(STEPS)]

    return run({"p": ranks}, rank), batches.read


def about(micro):
    """Return step, first sequence, tokens of the sequences, and scale."""
    return micro.step, micro.first, micro.tokens[:, 0].tolist(), micro.scale


def test_synchronous_microbatches_are_numbered_from_0():
    """All are scaled by the number of valid targets in the batch, and all ranks get the same."""
    ranks, read = fed("1f1b", 2, 3, ranks=2)
    scale = 1 / (5 * 64 + 1)
    assert read == [*range(STEPS)]
    for steps in ranks:
        for number, micros in enumerate(steps):
            first = 100 * number
            assert {mb: about(micro) for mb, micro in micros.items()} == {
                mb: (number, 2 * mb, [first + 2 * mb, first + 2 * mb + 1], scale)
                for mb in range(3)
            }


def test_asynchronous_microbatches_count_on_and_are_read_ahead():
    (steps,), read = fed("pipedream-2bw", 3, 3)
    assert read == [*range(STEPS)]
    assert [[*micros] for micros in steps] == [
        [0, 1, 2, 3, 4, 5],
        [3, 4, 5, 6, 7, 8],
        [6, 7, 8, 9, 10, 11],
        [9, 10, 11, 12, 13, 14],
        [12, 13, 14],
    ]
    assert about(steps[1][7]) == (2, 2, [202, 203], 1 / (5 * 64 + 1))


def test_microbatch_with_its_own_update_is_scaled_by_its_own_targets():
    (steps,), _ = fed("pipedream", 2, 3)
    assert [micro.scale for micro in steps[4].values()] == [1 / 65, 1 / 128, 1 / 128]


def test_microbatch_without_targets_has_a_finite_scale():
    targets = np.full((2, 4), IGNORE)
    (micro,) = microbatches(0, targets, targets, 1)
    assert micro.scale == 1


def test_evaluation_microbatches_have_their_own_cache(monkeypatch):
    """This also holds if a CUDA graph keeps the addresses of the training arrays."""
    settled = config("1f1b", 2, 3, batch=6)
    graphed = replace(settled, train=replace(settled.train, cuda_graph=True))
    monkeypatch.setattr(Pool, "on_device", True)

    def rank(mesh):
        made = [
            MicrobatchLoader(mesh, graphed, Counting(), program)
            for program in (program_of(settled), forward_program_of(settled))
        ]
        flags = [{micro.training for micro in feed.fetch(0).values()} for feed in made]
        return flags, [type(feed.cache) is DeviceCache for feed in made]

    assert run({}, rank) == [([{True}, {False}], [False, True])]
