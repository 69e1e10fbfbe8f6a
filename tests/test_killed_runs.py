"""Runs that save every step and are killed (kill -9) at a hundred random times are resumed, with
bitwise equal results.

Some use real ranks; most are processes with threads as ranks, which start faster.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest

import hpc3d.trace
from hpc3d.comm.threads import run
from hpc3d.trace.checks_per_rank import violations
from tests.checkpoints.killed_runs import LAYOUTS, child, ended, losses, run_until
from tests.checkpoints.test_saver import whole_ones
from tests.mpi import ROOT, checked, launcher, surroundings
from tests.pipeline.mixes import config_of, trainer_of
from tests.runs import newest, train, wait_for, words

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SAID = re.compile(r"^checkpoint step-(\d+): ", re.MULTILINE)
TINY = {
    "model__hidden": 24,
    "model__heads": 12,
    "train__batch": 12,
    "train__steps": 1000000,
    "checkpoint__every": 1,
    "mesh__x": 3,
}


def nothing_lost(folder, log):
    """Assert that the newest intact checkpoint is the last announced one or later, and at most one
    step behind the last step that was begun."""
    (kept, *_), announced = whole_ones(folder), [0, *map(int, SAID.findall(log.read_text()))]
    assert kept >= announced[-1]
    assert kept >= max(losses(folder)) - 1


@pytest.mark.parametrize(("layout", "kills", "seed"), [("serial", 40, 1), ("x=2", 35, 2)])
def test_run_killed_many_times_on_threads_loses_nothing(layout, kills, seed, tmp_path):
    """Every third process is killed while it starts."""
    draw, file = random.Random(seed), tmp_path / "losses"
    run_until(tmp_path, layout, 1)
    for number in range(kills):
        before = file.stat().st_size
        process = child(run_until, tmp_path, layout, 1 << 30)
        if number % 3 != 2:
            wait_for(lambda before=before: file.stat().st_size > before)
        time.sleep(draw.uniform(0, 0.3))
        os.kill(process, signal.SIGKILL)
        assert ended(process) == -signal.SIGKILL
        nothing_lost(tmp_path, tmp_path / "said")
    found, config = losses(tmp_path), config_of(LAYOUTS[layout])
    assert len(found) > kills // 2

    def whole(mesh):
        trainer = trainer_of(mesh, config)
        return {number: {repr(trainer.step(number).loss)} for number in range(len(found))}

    assert found == run(config.sizes(), whole)[0]


def started(printed, *line):
    """Start three ranks in the background, with their output in a file."""
    command = [launcher(), "-np", "3", sys.executable]
    environment = {**os.environ, **surroundings(), "PYTHONPATH": str(ROOT)}
    with printed.open("wb") as out:
        return subprocess.Popen(
            [*command, "-m", "tests.recorded_train", *map(str, line)],
            env=environment,
            start_new_session=True,
            stdout=out,
            stderr=subprocess.STDOUT,
        )


def kill_all(process, word):
    """Kill -9 the ranks, which have their own process groups, and their launcher."""
    subprocess.run(["pkill", "-9", "-f", str(word)], check=False)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_run_killed_25_times_on_mpi_ranks_loses_nothing(tmp_path):
    """Every fifth job is killed while it starts."""
    draw, file, printed = random.Random(3), tmp_path / "losses", tmp_path / "printed"
    file.touch()
    line = words(tmp_path / "results", **TINY)
    for number in range(25):
        before = file.stat().st_size
        process = started(printed, file, *line)
        try:
            if number % 5 != 4:
                stepped = lambda before=before: file.stat().st_size > before  # noqa: E731
                wait_for(stepped, said=printed.read_text)
                wait_for(lambda: [*tmp_path.glob("results/*/checkpoints/latest")])
            time.sleep(draw.uniform(0, 1))
        finally:
            kill_all(process, tmp_path)
        folder = newest(tmp_path / "results")
        if not (folder / "losses").exists():
            (folder / "losses").symlink_to(file)
        line = ["--resume", folder]
        nothing_lost(folder, folder / "train.log")
    assert_went_on(folder, file, tmp_path)


def assert_went_on(folder, file, out):
    """Assert that a last process succeeds, with losses and trace of an uninterrupted run."""
    found = losses(folder)
    steps = 2 + max(found)
    checked(
        *(3, "-m", "tests.recorded_train", file, "--resume", folder, "--train.steps", steps),
        timeout=250,
    )
    found = losses(folder)
    whole = train(3, out / "whole", **TINY | {"train__steps": steps, "checkpoint__every": 0})
    with hpc3d.trace.open(whole) as trace:
        mine = trace.steps["rank"] == 0
        expected = dict(zip(trace.steps["step"][mine], trace.steps["loss"][mine], strict=True))
    assert found == {step: {repr(loss)} for step, loss in floats(expected).items()}
    with hpc3d.trace.open(folder) as trace:
        assert violations(trace) == []


def floats(values):
    return {int(key): float(value) for key, value in values.items()}
