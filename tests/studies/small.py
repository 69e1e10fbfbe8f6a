"""Smaller studies with fewer steps, for the tests of the findings."""

from dataclasses import replace

from hpc3d.studies.pp_vs_dp.comparison import race
from hpc3d.studies.pp_vs_dp.message_sizes import buckets
from hpc3d.studies.pp_vs_dp.stage_balance import partitions
from tests.predict.fixed import MACHINE

RANKS, LAYERS, SEQUENCE, FLOAT = 4, 4, 16, 4
APART = replace(MACHINE, ranks_per_node=1, links=MACHINE.links[1:])  # a rank a node


def small(machine, hidden, batch, count):
    return race(machine, RANKS, hidden, batch, count, LAYERS, SEQUENCE)


def parted(counts=(1, 2, 4)):
    """Return the rows for 8 layers and 4 microbatches."""
    rows = partitions(MACHINE, 8, 64, 4, 512, counts)
    return rows[: len(counts)], rows[len(counts) :]


def summed():
    rows = buckets(APART, 256, 4, 512, 16, sizes=(1, 2, 4, 16))
    return rows[:4], rows[4:]
