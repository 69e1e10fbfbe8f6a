"""Profile of a PyTorch module on the device, a plan based on it, and training with the plan."""

import json
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.notes import Skip
from tests.gpu.ranks import launcher, printed, settings

MODEL = "inputs.partition.bert:made(256, 4, 4, 8, 64, vocabulary=2000)"
SMALL = "inputs.partition.bert:small"
PACKAGES = "torch", "networkx", "pydantic", "mpi4py"
CLOSE = {"float32": 1e-4, "bfloat16": 1e-2}


def cases(device, quick):
    for real in [real for real in device.reals if real in CLOSE][: 1 if quick else None]:
        yield f"profile, plan and 3 steps [{real}]", partial(planned, device, real)


def planned(device, real, notes):
    """Profile, plan and train with the commands; compare the losses with those of the CPU."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise Skip(f"no {package}")
    if launcher() is None:
        raise Skip("no MPI: no mpirun in $HPC3D_OPENMPI or on PATH")
    model, kind = (SMALL, "numpy") if device.fake else (MODEL, "cupy")
    words, backend = [model, "--dtype", real], ["--train.backend", kind]
    with tempfile.TemporaryDirectory() as folder:
        profile, plan = Path(folder) / "profile.json", Path(folder) / "plan.json"
        partition(notes, "profile", *words, "-o", profile, *backend)
        measured(device, json.loads(profile.read_text()), notes)
        partition(notes, *words, "--ranks", 1, "--profile", profile, "-o", plan)
        losses = {}
        for each in {kind: None, "numpy": None}:
            out = Path(folder) / each
            how = ["--steps", 3, "--train.backend", each, "--run.out", out]
            partition(notes, "run", plan, *how)
            (lines,) = out.glob("*/metrics.jsonl")
            losses[each] = [json.loads(line)["loss"] for line in lines.read_text().splitlines()]
    notes.same("losses", losses[kind], losses["numpy"], CLOSE[real])


def partition(notes, *words):
    command = [sys.executable, "-m", "hpc3d.partition", *map(str, words)]
    notes.fact(f"partition {words[0]}", printed(command, settings())[-4000:])


def measured(device, profile, notes):
    """Check the device name and the times of a profile, and report the workspace."""
    name = "CPU" if device.fake else device.cuda().name
    notes.check("name of the device", profile["device"] == name, found=profile["device"])
    pieces = [*profile["pieces"].values()]
    forward, backward = (sum(each[way][-1] for each in pieces) for way in (0, 1))
    notes.fact("forward and backward s of the batch", [forward, backward])
    notes.fact("overheads", profile["run"])
    notes.check("all passes take time", min(forward, backward) > 0)
    if not device.fake:
        notes.fact("largest workspace in bytes", max(each[2][-1] for each in pieces))
