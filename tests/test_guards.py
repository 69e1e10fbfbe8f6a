"""Runs with a wrong number end soon, and report the fault, its place and the next step."""

import re
import subprocess
import sys
import time

import pytest

import hpc3d.trace
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.trace.merge import merge
from tests.mpi import mpirun
from tests.runs import newest, said, words

slow = pytest.mark.slow
PROMPT = 150  # seconds; the watchdog would end the job after 1000
RANKS = 4
CHECKED = {"guard__abft_every": 1}
REPLICAS = {"mesh__x": RANKS, "parallel__scheme": "1d", "guard__replicas_every": 1}
PRODUCT = r"layer \d, \w+: product \[\d+, \d+\] \[\d+, \d+\]: row \d+, column"
FAULTS = [
    ("product", CHECKED, 3, PRODUCT),
    ("weight", {}, 4, r"layer 1, up.weight: 1 of \d+ .* value .*finite$"),
    (
        "received",
        CHECKED | {"mesh__transport": "mpi"},
        3,
        r".*: all_gather of \d+ .* float64 along \w+: .* rank \d ",
    ),
    (
        "replica",
        REPLICAS,
        3,
        r"parameter layers.1.norm2.gamma: .* ranks 0 1 2 3 along x ",
    ),
    ("gradient", {}, 4, r"layer 0, qkv.weight: 1 of \d+ .* gradient .*finite$"),
]


@slow
@pytest.mark.parametrize(("fault", "values", "code", "line"), FAULTS)
def test_numerical_fault_ends_the_job_and_is_named(fault, values, code, line, tmp_path):
    file, out = tmp_path / "time", tmp_path / "results"
    values = {"train__steps": 1000, "checkpoint__every": 1, "run__watchdog_s": 1000} | values
    done = mpirun(RANKS, "-m", "tests.guarded_train", fault, file, *words(out, **values))
    lasted = time.time() - float(file.read_text())
    run = newest(out)
    assert done.returncode == code, done.stderr
    assert lasted < PROMPT
    assert "Traceback" not in done.stderr
    head, first, *_, last = said(done)
    kind = {3: "corrupted", 4: "not finite"}[code]
    assert re.fullmatch(rf"hpc3d.train: {kind}: [1-9]\d* found", head)
    assert re.match(rf"hpc3d.train: rank {RANKS - 1}: step 2, {line}", first)
    assert re.fullmatch(f"hpc3d.train: .* --resume {run}", last)
    assert first.removeprefix("hpc3d.train: ") in (run / "train.log").read_text()
    saved = sorted((run / "checkpoints").glob("step-????????"))
    assert saved[-1].name == "step-00000002"
    assert not Checkpoint(saved[-1]).damage()
    with hpc3d.trace.open(merge(run)) as trace:
        assert any(name.startswith(f"guard: rank {RANKS - 1}: step 2") for name in trace.strings)


def test_stop_at_a_nan_is_not_preceded_by_warnings_of_numpy(tmp_path):
    diverging = {"train__learning_rate": 1e30, "train__clip": 0, "train__dtype": "float32"}
    line = words(tmp_path, **diverging)
    command = [sys.executable, "-m", "hpc3d.train", *line]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROMPT, check=False)
    assert done.returncode == 4
    assert [each for each in done.stderr.splitlines() if "Warning" in each] == []
