"""Plans on real ranks: training, resuming with another plan, and rejected input."""

import copy
import json
import os
import re
import signal
import sys

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file

import hpc3d.trace
from hpc3d.analyze.metrics.step import evaluation_rows
from hpc3d.checkpoints.block_slices import whole_of
from hpc3d.checkpoints.hf_export import export
from hpc3d.checkpoints.inspect import problems, shapes_in
from hpc3d.checkpoints.sharded import Checkpoint
from hpc3d.comm import threads
from hpc3d.console.exit_codes import BadData
from hpc3d.partition.capture import capture
from hpc3d.partition.execution import module_run
from hpc3d.partition.execution.module_run import (
    StepInputs,
    asked_for,
    configuration,
    other_device,
)
from hpc3d.partition.execution.sample_batches import shared_by_root
from tests.mpi import checked, mpirun
from tests.partition.execution.modules import (
    CLIP,
    DECAY,
    HERE,
    RATE,
    STEPS,
    points_of,
    prepared,
    too_few,
    trained_by_torch,
)
from tests.partition.execution.test_module_evaluator import HERE as EVALUATED
from tests.partition.test_plan_file import plan_of
from tests.partition.user_models import HERE as USERS
from tests.runs import losses, newest, said, when_running
from tests.strided import strided

COMMAND = ("-m", "hpc3d.partition", "run")
EVERYTHING = (f"{HERE}:in_double", "--torch.inputs", f"{HERE}:batch_of")
DROPPING = (f"{HERE}:dropping_in_double", "--torch.inputs", f"{HERE}:points_of")


def written(path, model, replicas, micros=2, schedule="1f1b", **how):
    schedule = schedule if replicas[1:] else "none"
    path.write_text(plan_of(model, replicas, micros, schedule, **how).text())
    return path


def tensors(run, step):
    """Return {(name, kind): array} of a checkpoint, which must be complete."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    assert problems(folder) == []
    opened, found = Checkpoint(folder), {}
    for name, kind in opened.sources:
        whole = whole_of(shapes_in(opened)[name])
        found[name, kind] = np.empty(whole.shape)
        opened.fill(found[name, kind], name, kind, whole)
    return found


def assert_same(found, expected):
    assert found.keys() == expected.keys() and found
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, 0, 1e-12, err_msg=str(key))


def assert_exported(run, name, target):
    """Assert that a checkpoint exports the state_dict of the module, with all its names."""
    (newest_one, *_) = sorted((run / "checkpoints").glob("step-????????"), reverse=True)
    export(Checkpoint(newest_one), target)
    module, _, _ = prepared(name)
    module = copy.deepcopy(module)
    loaded = load_file(target)
    module.load_state_dict(loaded)
    assert {key: value.shape for key, value in module.state_dict().items()} == {
        key: value.shape for key, value in loaded.items()
    }


CHANGES = [
    (EVERYTHING, ((1, 1), {}), ((1,), {"recompute": True})),
    (DROPPING, ((2, 1), {"zero": 1}), ((1, 1), {"chunks": 2, "schedule": "interleaved"})),
    (DROPPING, ((1, 1), {"recompute": True}), ((1, 3), {"schedule": "zb-h1"})),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "first", "second"), strided(CHANGES, 3, 1))
def test_run_killed_and_resumed_with_another_plan_matches_one_rank(model, first, second, tmp_path):
    """A rank is killed in the third step or later, and the run resumes with another plan. It is
    compared with a single rank that runs all steps."""
    name, *words = model
    words += ["--checkpoint.every", 1, "--checkpoint.keep", 1000, "--train.decay", "constant"]
    alone = written(tmp_path / "alone.json", name, (1,))
    checked(1, *COMMAND, alone, *words, "--run.out", tmp_path / "whole", "--steps", 40)
    whole, out = newest(tmp_path / "whole"), tmp_path / "killed"

    def kill(run):
        ranks = json.loads((run / "environment.json").read_text())["ranks"]
        os.kill(ranks[-1]["pid"], signal.SIGKILL)

    plan = written(tmp_path / "plan.json", name, first[0], **first[1])
    begun = (*COMMAND, plan, *words, "--run.out", out, "--steps", 100_000)
    done = mpirun(sum(first[0]), *begun, meanwhile=when_running(out, kill))
    assert done.returncode != 0
    run, other = newest(out), written(tmp_path / "other.json", name, second[0], **second[1])
    reached = int(sorted((run / "checkpoints").glob("step-????????"))[-1].name[5:])
    last = reached + 3
    checked(sum(second[0]), *COMMAND, other, "--resume", run, "--steps", last)
    if last <= 40:
        assert_same(tensors(run, last), tensors(whole, last))
    assert_same(tensors(run, 3), tensors(whole, 3))
    assert_exported(run, name, tmp_path / "model.safetensors")


AS_TORCH = {
    "seed": 0,
    "train.steps": STEPS,
    "train.learning_rate": RATE,
    "train.warmup": 0,
    "train.decay": "constant",
    "train.weight_decay": DECAY,
    "train.clip": CLIP,
    "checkpoint.every": STEPS,
}
SCHEDULES = {  # by ranks
    1: {"none": (1,)},
    2: dict.fromkeys(("gpipe", "interleaved", "zb-h1", "zb-h2"), (1, 1)),
    3: {"1f1b": (2, 1)},
    4: {
        "gpipe": (2, 2),
        "1f1b": (1, 1, 1, 1),
        "interleaved": (2, 2),
        "zb-h1": (2, 1, 1),
        "zb-h2": (1, 1, 1, 1),
    },
    8: {"interleaved": (2, 2, 2, 2), "zb-h2": (1, 2, 3, 2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", SCHEDULES)
def test_every_schedule_matches_torch_training(ranks, tmp_path):
    """Compares parameters and losses of the whole module after three steps."""
    name, plans = f"{HERE}:eight_layers", []
    for schedule, replicas in SCHEDULES[ranks].items():
        chunks, path = 2 if schedule == "interleaved" else 1, tmp_path / f"{schedule}.json"
        plans.append(written(path, name, replicas, 4, schedule, chunks=chunks))
    words = json.dumps([f"--{key}={value}" for key, value in AS_TORCH.items()])
    checked(ranks, "-m", "tests.partition.execution.several_runs", words, *plans, timeout=300)
    expected, seen = trained_by_torch(name, 4)
    for plan in plans:
        assert_trained(newest(plan.with_suffix("")), expected, seen)


def assert_trained(run, expected, seen):
    np.testing.assert_allclose(losses(run), seen, rtol=1e-10)
    found = tensors(run, STEPS)
    for key, value in expected.items():
        weight = found[key, "value"].reshape(value.shape)
        np.testing.assert_allclose(weight, value, 0, 1e-10, err_msg=key)


@pytest.mark.slow
def test_tensors_without_readers_are_saved_resumed_and_exported(tmp_path):
    name = f"{USERS}:idle"
    words = [f"--{key}={value}" for key, value in AS_TORCH.items()]
    plan = written(tmp_path / "plan.json", name, (1, 1))
    checked(2, *COMMAND, plan, *words, "--run.out", tmp_path)
    run = newest(tmp_path)
    expected, seen = trained_by_torch(name, 2)
    assert_trained(run, {key: each for key, each in expected.items() if each.size}, seen)
    checked(2, *COMMAND, "--resume", run, "--steps", 2 * STEPS)
    unused = tensors(run, 2 * STEPS)["unused", "value"]
    assert (unused == expected["unused"]).all() and (unused == 1).all()
    assert_exported(run, name, tmp_path / "model.safetensors")


@pytest.mark.slow
def test_run_is_evaluated_and_keeps_its_best_checkpoint_when_resumed(tmp_path):
    """The second run resumes after the best evaluation of the first one."""
    name, where = f"{EVALUATED}:double('dropping')", ("--run.out", tmp_path / "out")
    plan = written(tmp_path / "plan.json", name, (2, 1), 2, "1f1b", predicted={"device": "A GPU"})
    words = ["--checkpoint.every", 2, "--train.learning_rate", 0.1, "--train.warmup", 0, *where]
    often = ["--train.eval_every", 1, "--train.eval_batches", 2, "--checkpoint.keep_best", "true"]
    often += ["--torch.validation", f"{EVALUATED}:inputs_of"]
    checked(3, *COMMAND, plan, *words, *often, "--steps", 4)
    run = newest(tmp_path / "out")
    log = (run / "train.log").read_text()
    assert re.search(r"evaluation verified on 6 samples: loss \S+\n", log)
    assert re.search(r"evaluation after step 3: loss \S+; 24 samples in \S+ s", log)
    assert log.count("the plan is based on a profile of A GPU, but the run uses CPU") == 1
    checked(3, *COMMAND, "--resume", run, "--steps", 6, "--verify", "off")
    assert (run / "train.log").read_text().count("\nevaluation verified on 6 samples") == 2
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [each["validation_loss"] for each in records if "validation_loss" in each]
    assert len(found) == 6
    with hpc3d.trace.open(run / "trace.h5") as trace:
        assert trace.evaluation["loss"].tolist() == found
        assert np.isnan(trace.evaluation["accuracy"]).all()
        assert {row["perplexity"] for row in evaluation_rows(trace)} == {None}
    best = Checkpoint(run / "checkpoints" / "step-00000006").header["best"]
    assert best == {"step": int(np.argmin(found)) + 1, "loss": min(found)}


@pytest.mark.slow
def test_16_bit_run_resumes_with_its_master_weights(tmp_path):
    """The factory and its inputs are in float64; the plan converts them."""
    pytest.importorskip("ml_dtypes")
    name, *words = DROPPING
    words += ["--checkpoint.every", 2, "--train.decay", "constant"]
    plan = written(tmp_path / "plan.json", name, (2, 1), zero=1, dtype="bfloat16")
    checked(3, *COMMAND, plan, *words, "--steps", 4, "--run.out", tmp_path / "whole")
    checked(3, *COMMAND, plan, *words, "--steps", 2, "--run.out", tmp_path / "begun")
    run = newest(tmp_path / "begun")
    checked(3, *COMMAND, "--resume", run, "--steps", 4)
    found = tensors(run, 4)
    assert_same(found, tensors(newest(tmp_path / "whole"), 4))
    for key in [key for key in found if key[1] == "master"]:
        rounded = torch.from_numpy(found[key]).bfloat16().double()
        assert (rounded.numpy() == found[key[0], "value"]).all() and (rounded != 0).any()
    other = written(tmp_path / "other.json", name, (1,), dtype="float16")
    checked(1, *COMMAND, other, "--resume", run, "--steps", 6)
    export(Checkpoint(run / "checkpoints" / "step-00000006"), tmp_path / "model.safetensors")
    assert {each.dtype for each in load_file(tmp_path / "model.safetensors").values()} == {
        torch.float16
    }


def settled(tmp_path, *words, replicas=(1, 1), **how):
    """Return the resolved configuration of a command line."""
    plan = written(tmp_path / "plan.json", DROPPING[0], replicas, **how)
    asked = asked_for([str(plan), *map(str, words)])
    return configuration(asked, "float64")


def test_plan_overrides_layout_options(tmp_path):
    config = settled(tmp_path, "--steps", 7, "--train.clip", 0.5, replicas=(2, 1), zero=1)
    assert (config.mesh.p, config.mesh.d, config.parallel.zero) == (2, 2, 1)
    assert (config.train.steps, config.train.clip) == (7, 0.5)
    assert (config.train.batch, config.train.dtype) == (12, "float64")
    assert config.torch.factory == DROPPING[0]


def test_run_offloads_the_data_that_its_plan_offloads(tmp_path):
    assert settled(tmp_path, offload=["optimizer"]).parallel.offload == ("optimizer",)
    activations = ["--parallel.offload", '["activations"]']
    assert settled(tmp_path, *activations, offload=["optimizer"]).parallel.offload == (
        "activations",
    )


def test_offload_folder_must_be_writable(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"TMPDIR = .*/nowhere' is not writable"):
        settled(tmp_path, offload=["optimizer"])


def test_memory_options_are_accepted(tmp_path):
    words = ["--parallel.offload", '["optimizer","activations"]', "--parallel.keep_dtype", "int8"]
    parallel = settled(tmp_path, *words).parallel
    assert parallel.offload == ("optimizer", "activations") and parallel.keep_dtype == "int8"


@pytest.mark.parametrize(
    ("words", "how", "line"),
    [
        (["--model.layers", 3], {}, "--model.layers: not supported for torch modules"),
        (["--train.batch", 3], {}, "--train.batch: the plan sets .*; make a plan with --batch"),
        (["--train.dtype", "float16"], {}, "make a plan with --dtype"),
        (["--train.backend", "cupy"], {}, "float64 is not supported by train.backend = cupy"),
        (["--train.cuda_graph", "true"], {}, "--train.cuda_graph: not supported"),
        (["--parallel.recompute", "full"], {}, "make a plan with --recompute"),
        (["--parallel.zero", 2], {}, "parallel.zero = 2: .* use 0 or 1"),
        (["--data.validation", 0.1], {}, "--data.validation: .* torch.validation"),
        (["--train.clip", -1], {}, "train.clip = -1.0: must be at least 0"),
        (["--parallel.offload", '["parameters"]'], {}, "use optimizer and activations, or make"),
        (
            ["--parallel.offload", '["optimizer"]', "--train.optimizer", "sgd"],
            {},
            "train.optimizer = sgd has almost no state to offload",
        ),
        ([], {"schedule": "zb-v", "chunks": 2}, "schedule zb-v: .*--schedule zb-h1 or zb-h2"),
        ([], {"schedule": "pipedream"}, "schedule pipedream: .*--schedule 1f1b"),
        ([], {"replicas": (13, 1)}, "6 samples is too small for 13 replicas"),
        ([], {"replicas": (2, 1), "micros": 5}, "12 samples must be divisible by 5 microbatches"),
        (["--parallel.zero", 1], {"tensor": 2}, "parallel.zero = 1: .* 2 tensor-parallel ranks"),
        (["--train.backend", "cupy"], {"tensor": 2}, "train.backend = cupy: .* --tensor 1"),
        (["--train.optimizer", "muon"], {"tensor": 2}, "train.optimizer = muon: .* use adamw"),
    ],
)
def test_unsupported_options_are_rejected(words, how, line, tmp_path):
    with pytest.raises(ValueError, match=line):
        settled(tmp_path, *words, **how)


class Alone:
    """Job of one rank, without MPI."""

    rank, size = 0, 1
    from_root = on_root = on_all_ranks = staticmethod(lambda function: function())


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--verify", "forwards"], "torch.verify: input should be"),
        (["--train.eval_every", "2"], "train.eval_every = 2 requires torch.validation"),
        (["--torch.inputs", f"{HERE}:nowhere"], "has no function nowhere"),
        (["--run.metrics_hook", "nowhere:hook"], "run.metrics_hook"),
    ],
)
def test_invalid_options_are_rejected_before_the_capture(words, line, tmp_path, monkeypatch):
    plan = written(tmp_path / "plan.json", DROPPING[0], (1,))
    monkeypatch.setattr(module_run, "captured_of", None)
    with pytest.raises(ValueError, match=line):
        module_run.run(Alone(), [str(plan), *words])


@pytest.mark.parametrize(("words", "line"), [([], "the plan file is missing"), (["x"], "x")])
def test_plan_file_must_exist(words, line):
    with pytest.raises(ValueError, match=line):
        asked_for(words)


def test_inputs_must_match_the_captured_model():
    _, _, captured = prepared(DROPPING[0])
    assert [each.shape[0] for each in StepInputs(captured, points_of, 12)(3)] == [12, 12]
    with pytest.raises(BadData, match="validation batch 3: the inputs function raised IndexError"):
        StepInputs(captured, lambda step: points_of(step)[step], 12, 4)(3)
    for given, line in (
        (
            lambda step: points_of(step)[step],
            r"step 3: the inputs function raised IndexError: .* \(.*/test_module_run.py:\d+\)",
        ),
        (too_few, r"step 3: input x is float32 \[3, 4\], not float64 \[12, 4\]"),
        (
            lambda step: [each.int() for each in points_of(step)],
            "input x is int32 .*, not float64 ",
        ),
        (
            lambda step: [each.view(torch.int64) for each in points_of(step)],
            "input x is int64 .*, not float64 ",
        ),
        (lambda step: points_of(step)[:1], "step 3: 1 inputs were given, .* takes x, y"),
        (lambda step: {"x": points_of(step)[0]}, "step 3: the inputs are a dict; return a tuple"),
        (lambda step: sys.exit(4), r"step 3: the inputs function raised SystemExit: 4 \("),
        (
            lambda step: [each.numpy() for each in points_of(step)],
            r"x is ndarray float64 \[12, 4\], not a tensor; convert it with torch.as_tensor",
        ),
        (
            lambda step: [each.to_sparse() for each in points_of(step)],
            r"input x is sparse_coo; convert it with to_dense\(\)",
        ),
        (
            lambda step: [each.to("meta") for each in points_of(step)],
            "input x is on the device meta; return a tensor on the CPU",
        ),
    ):
        with pytest.raises(BadData, match=line):
            StepInputs(captured, given, 12)(3)


def test_validation_batches_are_checked_before_the_first_step():
    _, _, captured = prepared(DROPPING[0])
    made = []

    def given(number):
        made.append(number)
        return too_few(number) if number == 2 else points_of(number)

    batches = StepInputs(captured, given, 12, 4)
    with pytest.raises(BadData, match=r"validation batch 2: input x is float32 \[3, 4\]"):
        batches.check()
    assert made == [0, 3, 1, 2]
    line = "validation batches: 2 of 4 checked before the first step"
    assert batches.check(seconds=0) == [line]


def scaled():
    """Module whose inputs include a number, a flag and None."""

    class Scaled(torch.nn.Linear):
        def forward(self, x, scale, negative, mask):
            return (-1 if negative else 1) * scale * super().forward(x).mean()

    return Scaled(4, 4), (torch.zeros(4, 4), 2.0, False, None)


def test_constant_inputs_must_equal_those_of_the_plan():
    module, (x, *constants) = scaled()
    captured = capture(module, (x, *constants))
    assert StepInputs(captured, lambda step: (x, 2.0, False, None), 4)(0)[1:] == constants
    for given, line in (
        ((3.0, False, None), "step 1: input scale is 3.0, but the plan is for 2.0; pass values"),
        ((2.0, True, None), "input negative is True, but the plan is for False"),
        ((2.0, False, x), r"input mask is tensor float32 \[4, 4\], but the plan is for None"),
    ):
        with pytest.raises(BadData, match=line):
            StepInputs(captured, {1: (x, *given)}.get, 4)(1)


def test_plan_of_another_device_is_named_in_one_line():
    plan = plan_of(DROPPING[0], (1, 1), 2, "1f1b")
    on_gpu = plan._replace(predicted={"device": "NVIDIA H100"})
    (line,) = other_device(on_gpu, "CPU")
    assert "a profile of NVIDIA H100, but the run uses CPU" in line and "make a new plan" in line
    assert not [*other_device(on_gpu, "NVIDIA H100"), *other_device(plan, "CPU")]


def test_empty_parameter_is_broadcast():
    def shared(mesh):
        return shared_by_root(mesh.world, torch.zeros(0, 4), (0, 4), torch.float32)

    assert [[*each.shape] for each in threads.run({"x": 2}, shared)] == [[0, 4]] * 2


@pytest.mark.parametrize(
    ("ranks", "change", "line"),
    [
        (1, {}, "the plan is for 2 ranks, but 1 were started"),
        (2, {"graph": "0"}, "has changed since the plan was made"),
        (2, {"model": f"{HERE}:nowhere"}, "has no function nowhere"),
    ],
)
@pytest.mark.slow
def test_job_that_does_not_match_its_plan_exits_with_one_line(ranks, change, line, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(plan_of(DROPPING[0], (1, 1), 2, "1f1b")._replace(**change).text())
    done = mpirun(ranks, *COMMAND, path, "--run.out", tmp_path)
    assert done.returncode == 2 and line in "".join(said(done))
    assert len(said(done)) == 1
