"""A plan as a file for torchrun: what is in it, what is refused, and that it trains as torch does
without a cut."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import numpy as np

from hpc3d.partition.__main__ import main
from hpc3d.partition.capture import capture
from hpc3d.partition.execution.torchrun_file import torchrun_file
from hpc3d.partition.plan_file import SavedPlan, digest_of, name_of
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

CHAIN, EVERYTHING = f"{HERE}:chain", f"{HERE}:everything"
BERT, RESNET = "inputs.partition.bert:small", "inputs.partition.resnet:small"
RATE = 1e-2


def plan_of(captured, model, replicas, micros, schedule, chunks=1, recompute=False):
    """A SavedPlan of equal parts."""
    count = len(replicas) * chunks
    parts = [[name_of(captured, piece) for piece in part] for part in even_parts(captured, count)]
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
    """The file of a module that drops nothing, in float64."""
    _, _, captured = prepared(name)
    return torchrun_file(plan_of(captured, f"{HERE}:exact({name!r})", *how, **more), captured)


def methods(text):
    """The source of the forward pass of every part."""
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return [ast.unparse(node.body[-1]) for node in classes if re.fullmatch(r"Part\d+", node.name)]


def test_the_file_needs_torch_alone():
    tree = ast.parse(written(CHAIN, (1, 1), 4, "1f1b"))
    names = {
        name.partition(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module] if isinstance(node, ast.ImportFrom) else [node.names[0].name])
    }
    assert names - sys.stdlib_module_names == {"torch"}


def test_parts_are_readable_source():
    text = written(CHAIN, (1, 1), 4, "1f1b")
    first, second = methods(text)
    assert "self.layers" in first and "aten.linear.default(x, " in first
    assert first.startswith("def forward(self, inputs=None):") and "mse_loss" in second
    (name,) = [node.name for node in _borders(text)]
    assert name == "border_1" and "crossing([rows, 4], torch.float64, graded=True)" in text


def _borders(text):
    body = ast.parse(text).body
    return [node for node in body if getattr(node, "name", "").startswith("border_")]


@pytest.mark.parametrize(
    ("replicas", "micros", "schedule", "line"),
    [
        ((2, 1), 2, "1f1b", "--replicas 2"),
        ((1, 1), 5, "1f1b", "12 samples"),
        ((1, 1, 1), 2, "1f1b", "--schedule gpipe"),
        ((1, 1), 2, "zb-h1", "use 1f1b"),
    ],
)
def test_what_torch_does_not_have_is_refused(replicas, micros, schedule, line):
    with pytest.raises(ValueError, match=line) as refused:
        written(CHAIN, replicas, micros, schedule)
    assert "\n" not in str(refused.value)


def trained_by_torch(name, micros):
    """(state by name, losses) after STEPS steps on the whole module."""
    module, inputs = exact(name)
    batch, losses = prepared(name)[2].batch, []
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for micro in range(micros):
            rows = range(batch * micro // micros, batch * (micro + 1) // micros)
            loss = called(module, part_of(inputs, batch, rows))[1] / micros
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return state(module), losses


def run_by_torchrun(text, folder, processes):
    """(losses, what the file of every stage has) of a file that torchrun runs."""
    path = folder / "plan.py"
    path.write_text(text)
    root = str(Path(__file__).parents[3])
    words = ["--steps", str(STEPS), "--learning-rate", str(RATE), "--save", str(folder / "saved")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--standalone", str(path), *words]
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if "loss" in line]
    return losses, [torch.load(each) for each in sorted((folder / "saved").iterdir())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "micros", "schedule", "how"),
    [
        (CHAIN, (1, 1), 4, "1f1b", {}),
        (CHAIN, (2, 2), 3, "gpipe", {"recompute": True}),
        (CHAIN, (2,), 2, "none", {}),
        (EVERYTHING, (1, 1), 2, "interleaved", {"chunks": 2}),
        (EVERYTHING, (1, 1, 1, 1), 4, "gpipe", {"recompute": True}),
        (BERT, (1, 1, 1, 1), 4, "1f1b", {}),
        (BERT, (2, 2), 2, "interleaved", {"chunks": 2, "recompute": True}),
        (RESNET, (1, 1), 4, "1f1b", {"recompute": True}),
    ],
)
def test_torchrun_trains_as_the_whole(name, replicas, micros, schedule, how, tmp_path):
    text = written(name, replicas, micros, schedule, **how)
    losses, found = run_by_torchrun(text, tmp_path, sum(replicas))
    expected, known = trained_by_torch(name, micros)
    np.testing.assert_allclose(losses, known, rtol=1e-10)
    assert len(found) == len(replicas)
    for key, value in ((key, value) for stage in found for key, value in stage.items()):
        np.testing.assert_allclose(value.numpy(), expected[key], 0, 1e-10, err_msg=key)
    names = {key for stage in found for key in stage}
    module, _ = exact(name)
    assert {key for key, _ in module.named_parameters()} <= names
