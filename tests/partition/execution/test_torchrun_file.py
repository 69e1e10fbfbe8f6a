"""A plan as a file for torchrun: its contents, rejected plans, and training results equal to those
of unpartitioned torch."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from torch import nn

from hpc3d.partition.__main__ import main
from hpc3d.partition.capture import capture
from hpc3d.partition.execution.torchrun_file import torchrun_file
from hpc3d.partition.plan_file import SavedPlan, digest_of, names_of
from tests.partition.execution.modules import (
    HERE,
    STEPS,
    called,
    even_parts,
    exact,
    part_of,
    prepared,
    state,
)

LOSSES = "tests.partition.execution.test_loss_terms"
CHAIN, EVERYTHING = f"{HERE}:chain", f"{HERE}:everything"
BERT, RESNET = "inputs.partition.bert:small", "inputs.partition.resnet:small"
SMALL = [BERT, RESNET, *(f"inputs.partition.{name}:small" for name in ("unet", "translation"))]
UNUSUAL = "tests.partition.execution.test_torchrun_file:unusual"
RATE = 1e-2


def plan_of(captured, model, replicas, micros, schedule, chunks=1, recompute=False):
    """Return a SavedPlan of equal parts."""
    count = len(replicas) * chunks
    parts = [[names_of(captured)[piece] for piece in part] for part in even_parts(captured, count)]
    return SavedPlan(
        model=model,
        graph=digest_of(captured),
        batch=captured.batch,
        microbatches=micros,
        schedule=schedule,
        chunks=chunks,
        zero=0,
        replicas=[*replicas],
        recompute=[recompute] * count,
        parts=parts,
        predicted={},
    )


def written(name, *how, **more):
    """Return the file of a module without dropout, in float64."""
    _, _, captured = prepared(name)
    return torchrun_file(plan_of(captured, f"{HERE}:exact({name!r})", *how, **more), captured)


def methods(text):
    """Return the source of the forward pass of every part."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [ast.unparse(node.body[-1]) for node in classes if re.fullmatch(r"Part\d+", node.name)]


def test_torchrun_file_imports_only_torch():
    tree = ast.parse(written(CHAIN, (1, 1), 4, "1f1b"))
    names = {
        name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name])
    }
    assert names - sys.stdlib_module_names == {"torch"}


def test_stage_methods_are_readable_source():
    text = written(CHAIN, (1, 1), 4, "1f1b")
    first, second = methods(text)
    assert "self.layers" in first and "aten.linear.default(x, " in first
    assert first.startswith("def forward(self, inputs=None):") and "mse_loss" in second
    (name,) = [node.name for node in _borders(text)]
    assert name == "border_1" and "crossing([rows, 4], torch.float64, graded=True)" in text


def test_dropout_remains_a_torch_operation():
    forward = "".join(methods(written(f"{HERE}:dropping", (1, 1), 2, "gpipe")))
    assert forward.count("aten.dropout.default(") == 4


@pytest.mark.slow
def test_random_operations_remain_torch_operations():
    """`exact` seeds the generator, so that one chunk draws the numbers of the module."""
    text = written(f"{HERE}:noisy", (1,), 1, "none")
    for name in ("rand", "randn_like", "bernoulli_", "normal_", "uniform_", "rrelu_"):
        assert f"aten.{name}." in "".join(methods(text))
    loss, _ = parts_run(text)
    module, inputs = exact(f"{HERE}:noisy")
    assert abs(loss.item() - called(module, inputs)[1].item()) < 1e-12


def test_random_numbers_read_by_two_chunks_are_rejected():
    """Torch would draw different numbers in each chunk."""
    with pytest.raises(ValueError, match=r"^randn: several model chunks .*modules.py:\d+\)"):
        written(f"{HERE}:diffusion", (1, 1), 2, "gpipe")
    assert "aten.randn.default" in written(f"{HERE}:diffusion", (1,), 2, "gpipe")


def _borders(text):
    body = ast.parse(text).body
    return [node for node in body if getattr(node, "name", "").startswith("border_")]


class Unusual(nn.Module):
    """Inputs in lists and dicts, including one without samples and names used in the file; tensors
    created in forward; attributes, sizes and infinities as operands; and a noncontiguous value."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = torch.full((4,), 2.0), nn.BatchNorm1d(4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.layers[1].weight.requires_grad_(False)
        self.register_buffer("bias", torch.ones(4), persistent=False)

    def forward(self, inputs, rows, self_):
        x = self.norm(self.layers[0](inputs["device"][0])) * torch.tensor([1.0, 2.0, 3.0, 4.0])
        places = torch.arange(2 * x.shape[0]).view(-1, 2).sum(1, keepdim=True)
        x = self.layers[1](x.repeat(2, 1)) * self.table + self.bias + rows
        kept, turned = x > 0, x.view(-1, 2, 2).transpose(1, 2)
        x = torch.where(kept, x, -torch.inf).relu() / x.shape[0] ** 0.5
        y = self.layers[2](x) * kept + turned.flatten(1)
        return ((y + places.repeat(2, 1)) ** 2).mean() * self_


def unusual(dtype=torch.float64):
    numbers = torch.arange(24, dtype=dtype).reshape(6, 4)
    inputs = {"device": [torch.sin(numbers)], "unused": torch.ones(6)}
    return Unusual(), (inputs, torch.cos(numbers[0]), torch.tensor(2.0))


def unusual_in_float32():
    return unusual(torch.float32)


def parts_run(text, device="cpu"):
    """Return the loss and the gradients by name of a file's parts, which run one after the other
    on a batch, and check the values against the file's borders."""
    names = {"__name__": "plan"}
    exec(compile(text, "plan.py", "exec"), names)
    cut = names["CUT"]
    model, example = cut.make()
    given = {name: value.to(device) for name, value in cut.named(example).items()}
    given = {
        name: value[None] if name in cut.undivided else value for name, value in given.items()
    }
    held = {each: _held(model, each, cut) for part in cut.parts for each in part.reads_weights}
    held = {name: _moved(each, device) for name, each in held.items()}
    ends, received = [[], *(border(cut_samples(cut, given)) for border in cut.borders)], ()
    for part, border in zip(cut.parts, ends, strict=True):
        seen = [(*each.shape, each.dtype, each.requires_grad) for each in received]
        assert seen == [(*each.shape, each.dtype, each.requires_grad) for each in border]
        assert all(each.is_contiguous() for each in received)
        received = part(held, model.state_dict().keys())(*received, inputs=given)
    received.backward()
    return received, {name: each.grad for name, each in held.items() if each.grad is not None}


def _moved(tensor, device):
    """Return a copy, which is a parameter if the tensor is one."""
    moved = tensor.detach().to(device, copy=True)
    trained = isinstance(tensor, nn.Parameter)
    return nn.Parameter(moved, tensor.requires_grad) if trained else moved


def cut_samples(cut, given):
    return next(len(value) for name, value in given.items() if name not in cut.undivided)


def _held(model, name, cut):
    home, _, last = name.rpartition(".")
    return getattr(model.get_submodule(home), last, cut.constants.get(name))


@pytest.mark.parametrize(
    "name",
    [
        UNUSUAL,
        EVERYTHING,
        *(pytest.param(each, marks=pytest.mark.slow) for each in SMALL),
    ],
)
@pytest.mark.parametrize("count", [3, 5])
def test_generated_stages_compute_what_the_model_does(name, count):
    module, inputs = exact(name)
    text = written(name, (1,) * count, 1, "gpipe")
    loss, gradients = parts_run(text)
    expected = called(module, inputs)[1]
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-12 * expected.item()
    known = {key: each.grad for key, each in module.named_parameters() if each.grad is not None}
    assert gradients.keys() == known.keys()
    for key, each in known.items():
        assert torch.allclose(gradients[key], each, rtol=0, atol=1e-12), key


@pytest.mark.parametrize(
    ("replicas", "micros", "schedule", "line"),
    [
        ((2, 1), 2, "1f1b", "--replicas 2"),
        ((1, 1), 5, "1f1b", "12 samples"),
        ((1, 1, 1), 2, "1f1b", "--schedule gpipe"),
        ((1, 1), 2, "zb-h1", "use 1f1b"),
    ],
)
def test_plan_unsupported_by_torch_is_rejected(replicas, micros, schedule, line):
    with pytest.raises(ValueError, match=line) as refused:
        written(CHAIN, replicas, micros, schedule)
    assert "\n" not in str(refused.value)


def test_sum_over_samples_is_rejected():
    with pytest.raises(ValueError, match=r"the loss is a sum over the samples, .* -o PLAN.json"):
        written(f"{LOSSES}:summed", (1, 1), 2, "1f1b")


def test_master_weights_and_conversions_are_rejected():
    _, _, captured = prepared(CHAIN, torch.bfloat16)
    plan = plan_of(captured, CHAIN, (1,), 1, "none")._replace(dtype="bfloat16")
    with pytest.raises(ValueError, match="master weights") as refused:
        torchrun_file(plan, captured)
    assert "--dtype bfloat16: convert the module in the factory" in str(refused.value)


def test_constant_that_is_too_long_is_rejected():
    module = nn.Sequential(nn.Linear(4, 4), Constant())
    captured = capture(module, (torch.ones(4, 4),))
    plan = plan_of(captured, "nowhere:made", (1,), 1, "none")
    with pytest.raises(ValueError, match="10001 elements"):
        torchrun_file(plan, captured)


class Constant(nn.Module):
    def forward(self, x):
        return (x.sum() + torch.tensor([1.0] * 10_001)).mean()


def test_command_writes_the_torchrun_file(tmp_path, capsys):
    path = tmp_path / "plan.py"
    words = ["--ranks", "2", "--replicas", "1,1", "--schedule", "gpipe", "-o", str(path)]
    assert main([f"{__name__}:unusual_in_float32", *words]) == 0
    assert f"torchrun --nproc-per-node 2 {path}" in capsys.readouterr().out
    torch.manual_seed(1)
    loss, _ = parts_run(path.read_text())
    torch.manual_seed(1)
    module, inputs = unusual_in_float32()
    assert abs(loss.item() - called(module, inputs)[1].item()) < 1e-6 * loss.item()


@pytest.mark.slow
def test_file_search_skips_schedules_that_torch_lacks(tmp_path):
    words = ["inputs.partition.mlp:regression", "--ranks", "2", "--replicas", "1,1"]
    words += ["--batch", "64", "--microbatches", "4", "-o"]
    for end, lacking in (("py", False), ("json", True)):
        path = tmp_path / f"plan.{end}"
        assert main([*words, str(path)]) == 0
        assert ("zb-h1" in path.read_text()) == lacking


def test_generated_stages_run_on_the_device_of_their_inputs():
    """Tensors that they create are on this device, too."""
    loss, gradients = parts_run(written(UNUSUAL, (1, 1, 1), 2, "gpipe"), "meta")
    assert loss.is_meta and gradients and all(each.is_meta for each in gradients.values())


def test_single_microbatch_may_use_any_number_of_stages():
    assert "ScheduleGPipe,\n" in written(CHAIN, (1, 1, 1), 1, "1f1b")


def trained_by_torch(name, micros, replicas):
    """Train copies of the whole module on their rows for STEPS steps, with summed gradients and
    averaged buffers; return (state by name, losses)."""
    copies = [exact(name)[0] for _ in range(replicas)]
    inputs, batch, losses = exact(name)[1], prepared(name)[2].batch, []
    optimizers = [torch.optim.AdamW(module.parameters(), lr=RATE) for module in copies]
    count = micros * replicas
    for _ in range(STEPS):
        total = 0.0
        for share in range(count):
            module = copies[share // micros]
            rows = range(batch * share // count, batch * (share + 1) // count)
            loss = called(module, part_of(inputs, batch, rows))[1] / count
            loss.backward()
            total += loss.item()
        for several in zip(*(module.parameters() for module in copies), strict=True):
            gradient = sum(each.grad for each in several)
            for each in several:
                each.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for several in zip(*(module.buffers() for module in copies), strict=True):
            if several[0].is_floating_point():
                mean = sum(several) / replicas
                for each in several:
                    each.copy_(mean)
        losses.append(total)
    return state(copies[0]), losses


NO_THREADS_AT_EXIT = """
from pathlib import Path
names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
assert not [name for name in names if "gloo" in name], "threads of process groups are running"
"""


def run_by_torchrun(text, folder, processes):
    """Run a file with torchrun; return (losses, state in the file of every stage).

    A thread of a process group that runs at the end can abort the process.
    """
    path = folder / "plan.py"
    path.write_text(text + NO_THREADS_AT_EXIT)
    root = str(Path(__file__).parents[3])
    words = ["--steps", str(STEPS), "--learning-rate", str(RATE), "--save", str(folder / "saved")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--standalone", str(path), *words]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    return losses, [torch.load(each) for each in sorted((folder / "saved").iterdir())]


RUN = [
    (CHAIN, (1, 1), 4, "1f1b", {}),
    (CHAIN, (2, 2), 3, "gpipe", {"recompute": True}),
    (EVERYTHING, (2,), 2, "none", {}),
    (EVERYTHING, (1, 1, 1, 1), 4, "gpipe", {"recompute": True}),
    (BERT, (2, 2), 2, "interleaved", {"chunks": 2, "recompute": True}),
    (RESNET, (1, 1), 4, "1f1b", {"recompute": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "micros", "schedule", "how"),
    RUN,
)
def test_torchrun_training_matches_torch(name, replicas, micros, schedule, how, tmp_path):
    text = written(name, replicas, micros, schedule, **how)
    losses, found = run_by_torchrun(text, tmp_path, sum(replicas))
    expected, known = trained_by_torch(name, micros, replicas[0])
    np.testing.assert_allclose(losses, known, rtol=1e-10)
    assert len(found) == len(replicas)
    for key, value in ((key, value) for stage in found for key, value in stage.items()):
        np.testing.assert_allclose(value.numpy(), expected[key], 0, 1e-10, err_msg=key)
    names = {key for stage in found for key in stage}
    module, _ = exact(name)
    assert {key for key, _ in module.named_parameters()} <= names
