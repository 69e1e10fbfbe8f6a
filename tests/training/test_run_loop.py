"""The loop of a run with a fake trainer: conditions that end it, and saved checkpoints."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from hpc3d.comm.mesh import NullRecorder
from hpc3d.config.input_file import Config, ModelConfig, TrainConfig
from hpc3d.console.exit_codes import CHECK_FAILED, FAILED, STOPPED, JobExit
from hpc3d.training import run_loop
from hpc3d.training.evaluator import Best, Evaluation
from hpc3d.training.guard import Corrupt, GuardFinding
from hpc3d.training.run_loop import RunningJob, RunPlan, StepPosition, trained
from hpc3d.training.trainer import Step

STEPS = 5


class Recorded:
    """Fake objects that record all calls of the loop in a list."""

    def __init__(self, stop_after=None, fails_in=None, saves=True):
        self.stop_after, self.fails_in, self.saves = stop_after, fails_in, saves
        self.calls, self.lines, self.saved, self.number = [], [], 0, None

    def __getattr__(self, name):
        return lambda *given, **named: self.calls.append((name, *given))

    def step(self, number, stop_request=None):
        if stop_request is None:  # of the watchdog, or of the log
            return
        if number == self.fails_in:
            raise Corrupt([GuardFinding(0, "a wrong number")])
        asked = 1 if number == self.stop_after else 0
        return Step(number, 1.0, 0.1, 1.0, 8, 0.5, 0.0, 1, asked)

    @contextmanager
    def progress(self, doing):
        self.lines.append("progress begins")
        yield
        self.lines.append(f"progress ends: {doing}")

    def stop(self, number=None):
        if number is not None and self.saves:
            self.saved = number + 1
        return self.saves

    def say(self, line, style=""):
        self.lines.append(line)

    warn = say

    def gather(self, value):
        return [value]


def run(tmp_path, monkeypatch, evaluator=None, kind="gpt2", **how):
    """Return (messages of the loop, exit code or None)."""
    monkeypatch.setattr(run_loop.launch, "finish", lambda job: None)
    config = Config(model=ModelConfig(kind=kind), train=TrainConfig(steps=STEPS))
    one = Recorded(**how)
    one.mesh, one.rank, one.size = SimpleNamespace(trace=NullRecorder(), sizes={}), 1, 1
    one.kernels = ["host"] * 2
    one.request, one.trainer, one.config = int, one, config
    running = RunningJob(one, one, one, one, None, 0, evaluator and evaluator(one))
    try:
        trained(one, RunPlan(config, folder=tmp_path), running, one)
    except JobExit as end:
        return one.lines, end.code
    return one.lines, None


def test_run_completes_all_steps(tmp_path, monkeypatch):
    lines, code = run(tmp_path, monkeypatch)
    assert code is None and lines[2:] == [
        f"next: python -m hpc3d.report {tmp_path}",
        f"next: python -m hpc3d.plan {tmp_path}/config.toml --ranks 1",
        f"run kept in {tmp_path}",
    ]


@pytest.mark.parametrize(
    ("kind", "second"),
    [("gpt2", "generate {} --prompt TEXT"), ("bert", "evaluate {} --data TEXT")],
)
def test_run_with_a_checkpoint_names_the_commands_that_use_it(kind, second, tmp_path, monkeypatch):
    (tmp_path / "checkpoints" / "step-00000005").mkdir(parents=True)
    lines, _ = run(tmp_path, monkeypatch, kind=kind)
    assert lines[-2] == "next: python -m hpc3d." + second.format(tmp_path)


@pytest.mark.parametrize(("saves", "code"), [(True, STOPPED), (False, FAILED)])
def test_stop_saves_if_saving_is_possible(saves, code, tmp_path, monkeypatch):
    lines, found = run(tmp_path, monkeypatch, stop_after=2, saves=saves)
    assert found == code and lines[2].startswith(f"stopped after 3 of {STEPS} steps: ")
    assert ("saved; resume with --resume" in lines[3]) == saves


def test_stop_in_the_last_step_is_a_normal_end(tmp_path, monkeypatch):
    assert run(tmp_path, monkeypatch, stop_after=STEPS - 1)[1] is None


def test_failed_check_ends_the_run(tmp_path, monkeypatch):
    lines, code = run(tmp_path, monkeypatch, fails_in=3)
    assert code == CHECK_FAILED and "a wrong number" in lines
    assert lines[-1] == "no checkpoint was saved; set checkpoint.every and restart"


def test_first_step_shows_the_phase_microbatch_and_layer_at_the_time_of_display(
    tmp_path, monkeypatch
):
    begun = []

    def step(one, number, request=None):
        if callable(request):  # a step of the trainer
            begun.append(number)
            one.mesh.trace.begin_step(number)
            one.mesh.trace.at(0, 0, 0)
            one.mesh.trace.phase, one.mesh.trace.layer = "backward_input", 1
            return Step(number, 1.0, 0.1, 1.0, 8, 0.5, 0.0, 1, 0)

    monkeypatch.setattr(Recorded, "step", step)
    lines, _ = run(tmp_path, monkeypatch)
    assert begun == [*range(STEPS)]
    begin, end, *others = lines
    assert begin == "progress begins" and "progress" not in "".join(others)
    assert end == "progress ends: step 0: backward input, microbatch 1 of 1, layer 2 of 2"


def test_position_omits_microbatch_and_layer_outside_the_passes():
    trace = NullRecorder()
    trace.begin_step(4)
    assert str(StepPosition(trace, Config())) == "step 4: other"


class Evaluating:
    """Evaluator after every second step and the last one; that after step 3 is the best."""

    def __init__(self, one):
        self.one, self.best = one, None

    def after(self, number):
        self.one.lines.append(f"evaluated {number}")
        self.best = Best(4, 1.5) if number == 3 else self.best
        return Evaluation(number, 2.0, 8, 0.5, 0.1) if number in (1, 3, 4) else None


def test_evaluation_precedes_the_checkpoint_of_its_step(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(Recorded, "after", lambda one, *given, **how: one.lines.append(how), False)
    monkeypatch.setattr(
        Recorded, "evaluation", lambda one, found, best: calls.append((found.step, best)), False
    )
    lines, _ = run(tmp_path, monkeypatch, Evaluating)
    after = [lines[place + 1] for place, line in enumerate(lines) if "evaluated" in str(line)]
    assert after == [{"best": number == 3} for number in range(STEPS)]
    assert calls == [(1, False), (3, True), (4, False)]


def test_stop_request_skips_the_evaluation(tmp_path, monkeypatch):
    lines, _ = run(tmp_path, monkeypatch, Evaluating, stop_after=2)
    assert [line for line in lines if "evaluated" in line] == ["evaluated 0", "evaluated 1"]
