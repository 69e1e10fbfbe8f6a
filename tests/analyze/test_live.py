"""Status of a run while it is running."""

import json
import os
import platform
import subprocess
import sys
import time

import pytest

from hpc3d.analyze.live import ASCII_BARS, LiveRun, flow, sparkline, state
from hpc3d.runtime.metrics_file import NAME, MetricsFile
from tests.analyze.waiting_ranks import segment

NOW = 0.0  # so early that no step is long ago


def records(run, numbers, start=0, steps=10, **values):
    metrics = MetricsFile(run, start, [], print)
    for number in numbers:
        metrics.write(
            **{"step": number, "steps": steps, "loss": 6.0 - number, "seconds": 2.0}
            | {"tokens_per_s": 1000.0, "communication": 0.5, "peak_bytes": 10**7}
            | values
        )
    metrics.file.close()


def live(run, now=NOW, **how):
    found = LiveRun(run, **how)
    found.update(now)
    return found


def locked(run, pid, host=None, began=1000):
    """Write the lock of an attempt that began at the Unix time `began`, in seconds."""
    (run / "lock").write_text(f"process {pid} on {host or platform.node()}\n")
    os.utime(run / "lock", (began, began))


def dead():
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        process.wait()
    return process.pid


def test_live_state_goes_from_starting_to_running_silent_and_stopped(tmp_path):
    last = {"time": 1000.0, "seconds": 2.0}
    assert state(tmp_path, [], 0) == "starting"
    assert state(tmp_path, [last], 1059) == "running"
    assert state(tmp_path, [last], 1061) == "silent for 1 min 1 s"
    assert state(tmp_path, [last | {"seconds": 30.0}], 1149) == "running"
    log = tmp_path / "train.log"
    log.write_text("step     loss\n   1   3.0\nrun kept in results/a\n")
    assert state(tmp_path, [last], 9e9) == "ended"
    log.write_text(log.read_text() + "resume\nstep     loss\n   2   3.0\n")
    assert state(tmp_path, [last], 1001) == "running"
    log.write_text(
        log.read_text() + "stopped after 3 of 9 steps: received SIGTERM\nrun kept in results/a\n"
    )
    assert state(tmp_path, [last], 1001) == "stopped"
    log.write_text(log.read_text() + "2 ranks: x=2; Open MPI\n")  # resumed
    assert state(tmp_path, [last], 1001) == "running"


@pytest.mark.parametrize(
    "line",
    [
        "resume from the last checkpoint with --resume results/a",
        "go on from the last checkpoint with --resume results/a",  # in older logs
        "no checkpoint was saved; set checkpoint.every and restart",
    ],
)
def test_run_ended_by_a_guard_has_failed(line, tmp_path):
    (tmp_path / "train.log").write_text(f"step     loss\n   1   nan\n{line}\n")
    assert state(tmp_path, [], 0) == "failed"


def test_run_whose_process_died_without_a_final_log_line_has_failed(tmp_path):
    last = {"time": 1000.0, "seconds": 2.0}
    locked(tmp_path, dead())
    assert state(tmp_path, [last], 1001) == "failed"
    locked(tmp_path, dead(), host="elsewhere")
    assert state(tmp_path, [last], 1001) == "running"
    locked(tmp_path, dead())
    (tmp_path / "train.log").write_text("step     loss\nrun kept in results/a\n")
    assert state(tmp_path, [last], 1001) == "ended"


def test_resumed_run_is_starting_until_its_log_is_updated(tmp_path):
    """The log has no line of the new attempt yet, and the new process holds the lock."""
    log = tmp_path / "train.log"
    log.write_text("step     loss\nrun kept in results/a\n")
    locked(tmp_path, os.getpid(), began=1000.5)
    os.utime(log, (1000, 1000))
    assert state(tmp_path, [{"time": 1000.0, "seconds": 2.0}], 1001) == "starting"
    os.utime(log)
    assert state(tmp_path, [], 1001) == "ended"


def test_resumed_run_is_starting_until_its_first_step_has_finished(tmp_path):
    """The first attempt finished 6 of 6 steps. The second one trains 8 steps."""
    records(tmp_path, range(6), steps=6)
    began = live(tmp_path).recent[-1]["time"] + 1
    log = tmp_path / "train.log"
    log.write_text("step     loss\n   5   1.0\nrun kept in results/a\n1 rank: serial; MPI\n")
    (tmp_path / "config.toml").write_text("[train]\nsteps = 8\n")
    locked(tmp_path, os.getpid(), began=began)
    for line in ("", "step     loss  learning rate\n"):
        log.write_text(log.read_text() + line)
        found = live(tmp_path, began + 59)
        assert found.state == "starting" and "6 of 8 steps, 75%" in found.screen(80)
        assert live(tmp_path, began + 490).state == "starting for 8 min 10 s"
    (tmp_path / "config.toml").write_text("[train]\nsteps = 'x'\n")
    assert "6 of 6 steps, 100%" in live(tmp_path, began).screen(80)
    last = {"time": began + 500, "seconds": 2.0}
    assert state(tmp_path, [last], began + 501) == "running"


def test_live_screen_shows_progress_loss_and_axis_waits(tmp_path):
    records(tmp_path, range(4))
    with (tmp_path / NAME).open("a") as file:
        texts = '"validation_loss/a.h5": 3.0, "validation_loss/b.h5": null'
        file.write(f'{{"step": 3, "validation_loss": 3.25, {texts}}}\n{{"step": 4, "lo')
    segment(tmp_path, 0, 0, [("all_gather", 0, 10, 30)])
    found = live(tmp_path)
    found.update(found.recent[-1]["time"] + 1)
    text = "\n".join(found.screen(100))
    assert "4 of 10 steps, 40%, 12 s left, last step 1.00 s ago" in text
    assert "loss 3.0000, initially 6.0000  █▆▃▁" in text
    assert (
        "1,000 tokens/s, 2.00 s per step, communication 50.0%, peak memory per rank up to 10.0 MB"
        in text
    )
    assert "validation 3.2500 after step 3, the best so far, a.h5 3.0000" in text
    assert "\nx           30.0%" in text
    line = f"{tmp_path.name}   running: 4 of 10 steps, loss 3.0000, 1,000 tokens/s, 12 s left"
    assert found.line() == line


def test_speed_and_memory_are_those_of_the_latest_attempt(tmp_path):
    records(tmp_path, range(4), seconds=8.0, peak_bytes=10**8)
    locked(tmp_path, os.getpid())  # the first attempt began before its records
    assert "8.00 s per step" in "\n".join(live(tmp_path).screen(100))
    start = live(tmp_path).recent[-1]["time"]
    locked(tmp_path, os.getpid(), began=start + 1e-3)
    assert "8.00 s per step" in "\n".join(live(tmp_path).screen(100))  # no step yet
    time.sleep(2e-3)
    records(tmp_path, range(3, 6), start=3)
    text = "\n".join(live(tmp_path).screen(100))
    assert "2.00 s per step" in text and "per rank up to 10.0 MB" in text
    assert "6 of 10 steps, 60%, 8.00 s left" in text


def test_live_run_reads_only_new_records_and_rewinds_on_resume(tmp_path):
    records(tmp_path, range(5))
    found = live(tmp_path)
    assert found.losses == [6, 5, 4, 3, 2]
    records(tmp_path, [], start=5)
    found.update(NOW)
    records(tmp_path, [3], start=3, loss=9.0)
    found.update(NOW)
    assert found.losses == [6, 5, 4, 9]
    found.update(NOW)
    assert found.losses == [6, 5, 4, 9]


def test_live_screen_names_the_last_rank_to_arrive(tmp_path):
    calls = [("all_gather", number, 10 * number, 5) for number in range(4)]
    later = [("all_gather", number, 10 * number + 3, 2) for number in range(4)]
    segment(tmp_path, 0, 0, calls)
    segment(tmp_path, 1, 0, later)
    records(tmp_path, range(1))
    assert live(tmp_path).screen(80)[-1] == "last to arrive: rank 1 in 100%, of 4 calls"
    segment(tmp_path, 0, 1, calls[:2] + later[2:])
    segment(tmp_path, 1, 1, later[:2] + calls[2:])
    assert live(tmp_path).screen(80)[-1] == "no rank is often the last to arrive"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_live_screen_fits_the_terminal_width(tmp_path, width):
    records(tmp_path, range(40), steps=40)
    segment(tmp_path, 0, 0, [("recv", 0, 0, 100)])
    lines = live(tmp_path, bars=ASCII_BARS).screen(width)
    assert max(map(len, lines)) <= width and lines[0].endswith("   running")
    assert width == 20 or any("peak memory per rank" in line for line in lines)
    assert "\n".join(lines).isascii()


def test_flow_wraps_items_into_lines():
    assert flow(["one", "two", "three"], 8) == ["one, two", "three"]
    assert flow([], 8) == []


@pytest.mark.parametrize(
    "damage",
    [
        {"loss": {}},
        {"loss": "6"},
        {"seconds": "long"},
        {"seconds": None},
        {"peak_bytes": [1]},
        {"peak_bytes": 10**400},
        {"seconds": 1e200, "steps": 10**200},  # whose product is the time left
        {"steps": 0},
        {"step": True},
        {"step": None},
        {"tokens_per_s": float("inf")},
    ],
    ids=str,
)
def test_damaged_metrics_lines_are_skipped_and_counted(damage, tmp_path):
    records(tmp_path, [0])
    found = LiveRun(tmp_path)
    line = json.loads((tmp_path / NAME).read_text()) | {"step": 1} | damage
    short = {"step": 1, "loss": 2.0}
    with (tmp_path / NAME).open("a") as file:
        file.write(f"{json.dumps(line)}\n{json.dumps(short)}\n{'[' * 10**6}\n")
    found.update(NOW)
    assert f"skipped 3 damaged lines of {NAME}" in found.screen(80)
    assert "1 of 10 steps" in found.line()
    records(tmp_path, [1, 2])  # which rewrites the file
    found.update(NOW)
    assert "3 of 10 steps" in found.line()


def test_non_finite_losses_are_shown_in_the_sparkline(tmp_path):
    records(tmp_path, range(3), loss=float("nan"))
    assert any("???" in line for line in live(tmp_path).screen(80))
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline(range(100), 5) == "▁▃▅▆█"
