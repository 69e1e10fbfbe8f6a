"""Compare plans with simulations of all layouts that the rules allow."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

import pytest

from hpc3d.config.resolve import refuse
from hpc3d.config.rules import unknown_values
from hpc3d.predict.machine.machine import Link, Machine
from hpc3d.predict.machine.machine_file import load as load_machine
from hpc3d.predict.planning.ranked_layouts import ranked
from hpc3d.tensor.split import SCHEMES, Split
from tests.predict.machine.test_between_hosts import hosts
from tests.predict.planning.brute import every_layout, step
from tests.predict.planning.test_search import CLUSTER, ROOT, config_of, settled
from tests.strided import strided

KEYS = [
    *(f"model.{size}" for size in ("layers", "hidden", "heads", "sequence", "vocabulary")),
    "train.batch",
    "train.dtype",
]
HOSTS = hosts(2, wake=2e-5)  # of one core each
PAIRS = replace(CLUSTER, ranks_per_node=2, links=(Link(2, 2e-6, 100e9), *CLUSTER.links[1:]))
DISTANT = replace(CLUSTER, links=(Link(0, 2e-4, 100e9),))  # messages wait, and owners may pay
ADDED = Split(m="x", n="y", replicate="y")
EIGHT, OTHER = "model.experts=8 model.top_k=4", "model.moe_every=2 model.shared_experts=1"
GROUPED = "model.kind=llama model.ffn=512"


class Space(NamedTuple):
    """A model on a number of ranks of a machine; `memories` in bytes, in decreasing order."""

    model: str
    ranks: int
    machine: Machine
    memories: tuple
    orders: bool = False
    cut: bool = False
    more: str = ""  # further keys
    added: Split | None = None  # a scheme that the user has added
    varied: bool = False  # also with hybrid sharding and prefetching

    def line(self):
        values = zip(KEYS, self.model.split(), strict=True)
        return " ".join([*(f"{key}={value}" for key, value in values), self.more])

    def config(self):
        config = config_of(self.line())
        refuse([*unknown_values(config)])  # NumPy knows bfloat16 from here on
        return config


def machine(name):
    return load_machine(ROOT / "inputs" / "machines" / f"{name}.toml")


def chosen(space, memory):
    """Return the seconds and the peak of the best layout of a plan."""
    _, ranking = ranked(space.config(), space.ranks, space.machine, memory, 10)
    row = ranking.best(10)[0]
    assert row.simulated
    return row.seconds, row.peak


SPACES = {
    "2 ranks": Space("2 256 4 64 256 4 float32", 2, CLUSTER, (16e9, 20e6, 16e6)),
    "16 H100": Space("2 2048 16 512 4096 4 bfloat16", 16, machine("h100"), (80e9, 225e6, 176e6)),
    "8 A100": Space(
        "4 1024 16 256 1024 4 float16", 8, machine("a100-selene"), (80e9, 168e6, 139e6)
    ),
    "4 A100": Space("4 512 8 128 256 4 float16", 4, machine("a100-vtrain"), (80e9, 72e6, 66e6)),
    "6 H100": Space("3 768 12 256 2048 6 bfloat16", 6, machine("h100"), (80e9, 200e6, 120e6)),
    "2 nodes of 2": Space(
        "2 256 4 64 256 4 float32", 4, PAIRS, (16e9, 20e6, 16e6, 13e6, 12e6), True
    ),
    "2 hosts of 2": Space("2 256 4 64 256 4 float32", 4, HOSTS, (16e9, 16e6, 12e6), True),
    "a host of 4 on 2 cores": Space(
        "2 256 4 64 256 4 float32", 4, hosts(4, cores=2, wake=2e-5), (16e9, 16e6)
    ),
    "2 long sequences": Space(
        "2 256 4 2048 256 2 float32", 4, CLUSTER, (16e9, 60e6, 40e6), cut=True
    ),
    "one long sequence on hosts": Space(
        "2 128 2 2048 256 1 float32", 4, hosts(2, wake=2e-5), (16e9, 30e6), cut=True
    ),
    "4 of 8 experts see a token": Space(
        "2 256 4 64 256 4 float32", 4, CLUSTER, (16e9, 55e6, 46e6), more=EIGHT
    ),
    "2 nodes of 2 with experts in every other block": Space(
        "2 256 4 64 256 4 float32", 4, PAIRS, (16e9, 56e6, 34e6), True, more=f"{EIGHT} {OTHER}"
    ),
    "4 short sequences": Space("2 256 4 64 256 4 float32", 4, CLUSTER, (16e9, 16e6), cut=True),
    "a scheme of the user": Space(
        "2 256 4 64 256 4 float32",
        4,
        DISTANT,
        (16e9, 16e6, 12e6),
        added=Split(m="x", n="y", replicate="y"),
    ),
    "a key head on 2 H100": Space(
        "1 256 4 64 256 2 bfloat16",
        2,
        machine("h100"),
        (80e9, 6.7e6, 6.6e6),
        more=f"{GROUPED} model.kv_heads=1",
    ),
    "2 experts on 2 ranks": Space(
        "1 256 4 64 256 2 float32",
        2,
        CLUSTER,
        (16e9, 11.2e6, 10.7e6),
        more=f"{GROUPED} model.kv_heads=2 model.experts=2 model.top_k=1",
    ),
    "fused ring attention on 2 H100": Space(
        "1 256 2 4096 256 1 bfloat16",
        2,
        machine("h100"),
        (80e9, 92e6, 90e6),
        cut=True,
        more="train.backend=cupy",
    ),
    "2 groups of 2 replicas": Space(
        "1 255 1 128 4096 4 float32", 4, PAIRS, (16e9, 24.6e6, 16.2e6), varied=True
    ),
}


KNOWN = [  # with more sequences than all layouts are tried with
    (
        SPACES["16 H100"]._replace(model="2 2048 16 512 4096 8 bfloat16"),
        "p=2 d=4 x=2 scheme=1d-sequence zero=2 schedule=zb-h1",
    ),
    (
        SPACES["8 A100"]._replace(model="4 1024 16 256 1024 8 float16"),
        "p=4 d=2 zero=2 microbatches=2 schedule=zb-h1",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("space", "line"), KNOWN, ids=["16 H100", "8 A100"])
def test_known_fast_layouts_are_found(space, line):
    config = settled(f"{space.line()} {line}", space.ranks)
    best, _ = step(config, config.model.vocabulary, space.machine)
    assert chosen(space, 80e9)[0] <= 1.02 * best


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", strided(SPACES, 99, 99))
def test_no_layout_is_faster(name, monkeypatch):
    """For any memory size, plans are within 2 % of the fastest layout that fits.

    Plans are never faster with less memory.
    """
    space, found = SPACES[name], []
    if space.added:
        monkeypatch.setitem(SCHEMES, "added", space.added)
    config = space.config()
    layouts = every_layout(config, space.ranks, space.orders, space.cut, varied=space.varied)
    steps = [step(each, config.model.vocabulary, space.machine) for each in layouts]
    for memory in space.memories:
        seconds, peak = chosen(space, memory)
        best = min((seconds for seconds, peak in steps if peak <= memory), default=inf)
        assert peak <= memory
        assert seconds <= 1.02 * best, memory
        found.append(seconds)
    assert all(more <= less for more, less in pairwise(found))
