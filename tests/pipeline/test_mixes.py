"""Every mix of pipeline, data parallelism, ZeRO and tensor scheme trains the serial model."""

from itertools import product

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.tensor.split import SCHEMES
from tests.fakes.read_only import read_only
from tests.mpi import checked
from tests.pipeline.in_torch import RULES
from tests.pipeline.mixes import (
    LARGE,
    MIXES,
    Tokens,
    alone,
    config_of,
    cover,
    ranks,
    same,
    serial,
    train,
    words_of,
)
from tests.strided import strided

SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous]
COUNTS = 4, 8, 12, 16


@pytest.mark.parametrize("line", strided(MIXES, 60, 6, slow=13))
def test_a_mix_is_serial(line):
    config, expected = config_of(line), serial(alone(line))
    found = run(config.mesh.sizes(), lambda mesh: train(read_only(mesh), config))
    for trained in found:
        same(trained, expected)
    cover(found, expected)


KINDS = dict.fromkeys(line for line in map(alone, MIXES) if "dropout" not in line)


@pytest.mark.parametrize("line", strided(KINDS, 4, ids=lambda line: line or "plain", slow=2))
def test_serial_is_torch(line):
    config, found = config_of(line), serial(line)
    same(found, RULES["none"](config))


def test_clipping_and_uneven_microbatches_matter():
    config, expected = config_of(""), serial("")
    assert min(norm for _, norm in expected.totals) > config.train.clip
    _, targets = Tokens(config).batch(0)
    valid = [int((part >= 0).sum()) for part in np.split(targets, 12)]
    assert valid[0] > valid[4] > valid[8] > valid[11] == 0


def test_the_table_has_every_schedule_with_every_zero_and_every_scheme():
    words = [words_of(line) for line in MIXES]
    piped = {(w.get("schedule"), w.get("zero")) for w in words if {"p", "d"} <= w.keys()}
    csv = next(name for name, _ in piped if name.startswith("csv:"))
    names = [*SYNCHRONOUS, csv]
    names.remove("none")
    assert set(product(names, "0123")) <= piped
    assert {("none", zero) for zero in "0123"} <= {(w["schedule"], w.get("zero")) for w in words}
    schemes = {w.get("scheme", "3d") for w in words if "p" in w and w.keys() & {"x", "y", "z"}}
    assert schemes == set(SCHEMES)
    assert {ranks(line) for line in MIXES} >= {1, 2, *COUNTS}


def on_mpi(transport, lines, timeout):
    (count,) = {ranks(line) for line in lines}
    where = "-m", "tests.pipeline.on_mpi", transport
    _, *done = checked(count, *where, *lines, timeout=timeout).splitlines()
    assert done == lines


def of_size(count):
    return [line for line in MIXES if ranks(line) == count]


# Each count's lines in up to twelve parts, in shared memory and as messages by turns.
PARTS = [
    (count, first, ("auto", "mpi")[first % 2])
    for count in COUNTS
    for first in range(min(12, len(of_size(count))))
]


@pytest.mark.slow
def test_some_mixes_on_real_ranks_are_serial():
    """On 4 ranks in shared memory; as messages, some of test_deadlock.py are."""
    on_mpi("auto", of_size(4)[::12], timeout=250)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "first", "transport"), strided(PARTS, 13, slow=0))
def test_every_mix_on_real_ranks_is_serial(count, first, transport):
    on_mpi(transport, of_size(count)[first::12], timeout=280)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", strided(range(12), 12, slow=0))
def test_a_mix_on_64_ranks_is_serial(first):
    on_mpi("auto", LARGE[first::12], timeout=880)
