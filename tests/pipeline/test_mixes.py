"""Mixes of pipeline, data parallelism, ZeRO and tensor scheme, compared with the serial model."""

from itertools import cycle, product

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.tensor.split import SCHEMES
from tests.fakes.read_only import read_only
from tests.jobs import Case
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
from tests.strided import covering, daily, strided

SYNCHRONOUS = [name for name, schedule in SCHEDULES.items() if not schedule.asynchronous]


# Few ranks first: one mix per schedule, scheme, stage of ZeRO, context form and family.
KEYS = "schedule", "scheme", "zero", "context", "kind", "shard"
QUICK = covering(sorted(MIXES, key=ranks), KEYS)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[] if line in QUICK else [daily, pytest.mark.slow])
        for line in MIXES
    ],
)
def test_hybrid_parallel_training_matches_serial(line):
    config, expected = config_of(line), serial(alone(line))
    found = run(config.sizes(), lambda mesh: train(read_only(mesh), config))
    for trained in found:
        same(trained, expected)
    cover(found, expected)


KINDS = dict.fromkeys(line for line in map(alone, MIXES) if "dropout" not in line)


@pytest.mark.parametrize("line", strided(KINDS, 4, ids=lambda line: line or "plain", days=1))
def test_serial_training_matches_torch(line):
    config, found = config_of(line), serial(line)
    same(found, RULES["none"](config))


def test_training_cases_exercise_clipping_and_uneven_microbatches():
    config, expected = config_of(""), serial("")
    assert min(norm for _, norm in expected.totals) > config.train.clip
    _, targets = Tokens(config).batch(0)
    valid = [int((part >= 0).sum()) for part in np.split(targets, 12)]
    assert valid[0] > valid[4] > valid[8] > valid[11] == 0


def test_cases_cover_every_schedule_zero_stage_and_scheme():
    words = [words_of(line) for line in MIXES]
    piped = {(w.get("schedule"), w.get("zero")) for w in words if {"p", "d"} <= w.keys()}
    csv = next(name for name, _ in piped if name.startswith("csv:"))
    names = [*SYNCHRONOUS, csv]
    names.remove("none")
    assert set(product(names, "0123")) <= piped
    assert {("none", zero) for zero in "0123"} <= {(w["schedule"], w.get("zero")) for w in words}
    schemes = {w.get("scheme", "3d") for w in words if "p" in w and w.keys() & {"x", "y", "z"}}
    assert schemes == set(SCHEMES)
    assert {ranks(line) for line in MIXES} >= {1, 2, 4, 6, 8, 12, 16}


ON_MPI = "tests.pipeline.on_mpi"


def cases(lines):
    """Return the lines on real ranks, alternately with shared memory and with messages."""
    transports = cycle(("auto", "mpi"))
    return [Case(ranks(line), next(transports), line) for line in lines]


@pytest.mark.slow
@pytest.mark.timeout(0)  # tests.jobs limits each case
@pytest.mark.parametrize("case", cases(MIXES), ids=str)
def test_hybrid_parallel_training_on_mpi_ranks_matches_serial(run_in_job, case):
    run_in_job(ON_MPI, case)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("case", [Case(64, "auto", f"{line} steps=2") for line in LARGE], ids=str)
def test_hybrid_parallel_training_on_64_ranks_matches_serial(run_in_job, case):
    run_in_job(ON_MPI, case)
