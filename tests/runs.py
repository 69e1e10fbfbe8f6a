"""Small runs of `train` on real ranks, and their results."""

import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import numpy as np

import hpc3d.trace
from hpc3d import train as verb
from tests.mpi import checked

# Divides over 2 x 2 x 2, 2 x 3 x 2, 3 x 3 x 3 and 4 x 4 x 4, and over 8 ranks in every scheme.
SMALL = {
    "model.hidden": 144,
    "model.heads": 24,
    "model.sequence": 4,
    "train.batch": 144,
    "train.decay": "constant",  # so that a shorter run has the first losses of a longer one
    "train.dtype": "float64",
}


def words(out, **values):
    """Return the command line of a small run under `out`; `__` stands for the dot of a key."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    options = {**SMALL, "run.out": out, **given}
    return [str(word) for key, value in options.items() for word in (f"--{key}", value)]


def train(ranks, out, timeout=250, **values):
    """Return the folder of a run that must succeed."""
    checked(ranks, "-m", "hpc3d.train", *words(out, **values), timeout=timeout)
    return newest(out)


def plan_of(words, ranks=1):
    """Open the run of a command line as rank 0 of `train` does, and return its plan."""
    plan = verb.read_command_line(ranks, [str(word) for word in words])
    tokens, *_ = verb.take_text(plan)
    verb.checked_program(plan.config)
    verb.open_folder(plan, tokens).close()
    return plan


def newest(out):
    return max(Path(out).iterdir(), key=lambda path: path.stat().st_mtime_ns)


def said(done):
    """Return hpc3d's messages on standard error, without progress lines; messages of the launcher
    may be on the same line."""
    return re.findall(r"hpc3d\.\w+: (?!\d+ s: ).*", done.stderr)


def without_progress(text):
    """Return standard error without progress lines."""
    return re.sub(r"hpc3d\.\w+: \d+ s: .*\n", "", text)


def losses(path):
    with hpc3d.trace.open(path / "trace.h5") as trace:
        mine = trace.steps["rank"] == 0
        assert (np.diff(trace.steps["step"][mine]) == 1).all()
        return trace.steps["loss"][mine]


def interruptible():
    """Restore SIGINT and SIGHUP in a child process; in a background shell, they are ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_for(condition, seconds=500, said=str):
    """Wait until `condition()`. The limit only catches hangs; `said()` is the error message."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, said()
        time.sleep(0.05)


def processes(word):
    """Return the command lines that contain `word`; NULs separate their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().decode(errors="replace")
            found += [command] if str(word) in command else []
    return found


def assert_gone(word):
    """Wait until no process has `word` in its command line."""
    wait_for(lambda: not processes(word), said=lambda: f"still alive: {processes(word)}")


def time_is_up_when(monkeypatch, condition, limit):
    """End a wait of `limit` seconds for a process when `condition()` holds, as if this time had
    passed."""

    class Waited(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout != limit:
                return super().wait(timeout)
            wait_for(condition)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Waited)


def when_running(out, act):
    """Return a `meanwhile` that calls `act(run folder)` after the second step of a run."""

    def wait():
        wait_for(lambda: any("   1 " in log.read_text() for log in out.glob("*/train.log")))
        act(newest(out))

    return wait


def ended(main, *words):
    """Return the exit code of a command in this process."""
    try:
        return main([str(word) for word in words])
    except SystemExit as end:
        return end.code
