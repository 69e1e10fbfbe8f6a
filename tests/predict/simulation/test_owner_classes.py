"""Steps in which one rank owns each block: one rank of each class is simulated."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest

from hpc3d import trace
from hpc3d.comm.mesh import WORLD
from hpc3d.predict.simulation import simulator
from hpc3d.predict.simulation.count import every_rank
from hpc3d.predict.simulation.owner_classes import OwnerClasses, owner_classes
from hpc3d.predict.simulation.simulator import simulate, step_length
from hpc3d.predict.simulation.summary import summary
from hpc3d.predict.simulation.write_trace import write_trace
from hpc3d.trace.checks_per_rank import violations
from hpc3d.trace.schema import CATEGORY, OP, PHASE
from tests.pipeline.mixes import config_of
from tests.predict.fixed import MACHINE
from tests.strided import strided

COMM, COPY = map(CATEGORY.index, ("comm", "copy"))
OF_CALLS = ["category", "op", "phase", "layer", "microbatch", "seq", "count", "dtype", "flops"]
LINES = """
x=2 y=2 z=2 schedule=none microbatches=1 layers=1 scheme=3d-broadcast
p=2 d=2 x=2 y=2 schedule=zb-h1 microbatches=2 zero=1 scheme=3d-broadcast
p=2 x=2 y=2 z=2 schedule=interleaved chunks=2 microbatches=4 scheme=3d-broadcast kind=bert
c=2 x=2 y=2 z=2 schedule=none microbatches=3 sequence=4 scheme=3d-broadcast
d=2 x=2 y=3 z=2 schedule=none microbatches=2 zero=3 scheme=3d-broadcast hidden=72
x=2 y=2 schedule=none microbatches=2 scheme=3d-broadcast optimizer=muon
x=2 y=2 z=3 schedule=none microbatches=2 hidden=72 split='{m="x",n="y",k="z",own="y"}'
x=2 y=2 z=2 schedule=none microbatches=2 split='{m="x",n="y",k="z",own="x",replicate="y"}'
""".strip().splitlines()


def simulated(line):
    config = config_of(line)
    return config, simulate(config, config.model.vocabulary, MACHINE)


def of_passes(rows):
    """Return the rows of passes: along d, ranks split their updates at different parameters."""
    return rows[(rows["category"] != COPY) & (rows["phase"] != PHASE.index("optimizer"))]


def test_cube_has_four_classes():
    """A rank owns its block of X if x = y, and those of W and Y if x = z."""
    classes = owner_classes(config_of("x=3 y=3 z=3 hidden=72 batch=54 scheme=3d-broadcast"))
    assert sorted(classes.counts) == [3, 6, 6, 12]
    assert classes.first[0] == 0 and classes.counts[0] == 3
    assert owner_classes(config_of("x=2 y=2 z=2 scheme=3d")) is None


@pytest.mark.parametrize("line", strided(LINES, 8))
def test_classes_make_the_calls_of_all_ranks(line, tmp_path):
    """A trace of all ranks has the rows that each of them records; the bytes are exact."""
    config, runs = simulated(line)
    classes, counted = owner_classes(config), every_rank(config, config.model.vocabulary)
    assert 1 < len(classes.first) == len(runs[0].classes) <= 16
    path = write_trace(tmp_path, runs, config, MACHINE)
    with trace.open(path) as opened:
        assert violations(opened) == []
        events = opened.events
        for rank, theirs in enumerate(counted):
            rows = (events["rank"] == rank) & (events["category"] == COMM)
            calls = theirs.events[theirs.events["category"] == COMM]
            for name in ("bytes", "count", "peer"):
                ours = [np.sort(events[name][rows]), np.sort(calls[name])]
                np.testing.assert_array_equal(*ours, err_msg=f"{name} of rank {rank}")
            run = runs[config.mesh.grid().coord(rank, "p")].classes[classes.of_rank[rank]]
            ours, theirs = map(of_passes, (run.rows, theirs.events))
            for name in OF_CALLS:
                np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


@pytest.mark.parametrize("line", strided(LINES, 99, 99))
def test_summary_counts_the_ranks_of_each_class(line):
    config, runs = simulated(line)
    counted = every_rank(config, config.model.vocabulary)
    found = summary(runs, config, MACHINE)
    assert found["flop"] == sum(chain(*(rank.flops().values() for rank in counted)))
    grid, received = config.mesh.grid(), []
    for rank in (each for number, each in enumerate(counted) if not grid.coord(number, "p")):
        received.append(Counter())
        for (axis, op, _), (_, nbytes) in rank.moved().items():
            received[-1][axis, op] += nbytes
    ours = Counter()
    for axis, ops in found["bytes"].items():
        ours |= Counter({(axis, op): each["bytes"] for op, each in ops.items()})
    assert sum(row["bytes"] for row in found["sections"][0]) == ours.total()
    for each in (ours, *received):
        del each[WORLD, "broadcast"]  # of the batch, which the first rank sends
    # Ranks of a class can be roots of different numbers of broadcasts along an axis of 3 ranks.
    assert ours in received and ours.total() > 0.92 * max(each.total() for each in received)
    totals = [each.ranks * each.peak["all"] for run in runs for each in run.classes]
    assert found["memory"]["total"] == sum(totals)


@pytest.mark.parametrize("line", strided(LINES, 99, 99))
def test_first_rank_determines_step_time_and_peak(line, monkeypatch):
    """Simulated alone, it takes as long as with the others. Simulating every rank with its own
    clock gives the same times and peaks as simulating one rank of each class."""
    config, runs = simulated(line)
    assert all(run.peak["all"] >= each.peak["all"] for run in runs for each in run.others)
    assert all(run.busy >= each.busy for run in runs for each in run.others)
    ranks = config.mesh.grid().size
    alone = range(ranks // config.mesh.p)

    def every(config):
        classes = owner_classes(config)
        together = {name: np.ones((len(alone),) * 2, bool) for name in classes.together}
        return OwnerClasses(np.arange(ranks) % len(alone), [*alone], [1] * len(alone), together)

    classes = owner_classes(config)
    monkeypatch.setattr(simulator, "owner_classes", lambda config: None)
    first = step_length(simulate(config, config.model.vocabulary, MACHINE))
    assert step_length(runs) == pytest.approx(first, rel=0.01 if config.mesh.p > 1 else 0)
    if config.mesh.p == config.mesh.d == 1:
        monkeypatch.setattr(simulator, "owner_classes", every)
        (whole,) = simulate(config, config.model.vocabulary, MACHINE)
        for rank, run in enumerate(whole.classes):
            of_class = runs[0].classes[classes.of_rank[rank]]
            assert Counter(run.peak) == Counter(of_class.peak)
            ours, theirs = (of_passes(each.rows) for each in (run, of_class))
            work = [rows["dur"][rows["category"] != COMM].sum() for rows in (ours, theirs)]
            assert work[0] == work[1]


def test_owner_waits_for_no_other_rank():
    """Along y, the owner of X normalizes its rows while the others wait for the broadcast."""
    _, (run,) = simulated("y=2 schedule=none microbatches=1 layers=1 scheme=3d-broadcast")
    norms = [(each.rows["op"] == OP.index("norm")).sum() for each in run.classes]
    waits = [each.rows["dur"][each.rows["category"] == COMM].sum() for each in run.classes]
    spent = [each.rows["dur"][each.rows["op"] == OP.index("norm")].sum() for each in run.classes]
    assert len(norms) == 2 and spent[0] > spent[1] and waits[0] < waits[1]
