"""Profile a torch module on this machine, so that the planner can use measured costs.

    python -m hpc3d.partition profile MODULE:FACTORY -o PROFILE.json
    mpirun -np N python -m hpc3d.partition profile MODULE:FACTORY -o PROFILE.json
    python -m hpc3d.partition MODULE:FACTORY --ranks N --profile PROFILE.json -o PLAN.json

Each rank runs forward and backward passes of the module with real data on a single core, in
microbatches of 1, 2, 4, ... samples up to the batch size. The command measures the time of every
operation, and the overhead of a model chunk, a step and an optimizer update. All N ranks measure
at the same time, because they also compute at the same time during training. With several ranks,
the command also measures messages and all-reduces. The module must return its loss.

With --train.backend cupy, each rank measures on a GPU, as partition run trains with this option.
The command then also measures the workspace of every operation. --train.tf32 and --mesh.transport
are the other keys of an input file (docs/configuration.md) that the command accepts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.config.argument_types import integer, positive
from hpc3d.config.limits import INT32, TRAINED_TYPES
from hpc3d.console.command_line import Parser, split_options
from hpc3d.console.small_files import replacing
from hpc3d.runtime import launch
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.comm.mesh import Mesh
    from hpc3d.config.input_file import Config
    from hpc3d.partition.measured_profile import ModuleProfile
    from hpc3d.partition.profiles.one_rank_run import OneRankRun
    from hpc3d.partition.profiles.processor import Processor
    from hpc3d.runtime.job import Job

_KEYS = "train.backend", "train.tf32", "mesh.transport"
_REPEATS = 7
_CONVERT = "convert the module and its floating-point inputs to this data type"


def main(argv: list[str] | None = None) -> int:
    """Measure the module; return exit code 2 if it cannot be measured."""
    words, settings = split_options(sys.argv[1:] if argv is None else argv)
    options = parser().parse_args(words)
    return launch.run("partition", lambda job: _profile(job, options, settings))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("partition profile", __doc__)
    add = parser.add_argument
    add("model", metavar="MODULE:FACTORY", help="function that returns a module and its inputs")
    path = {"type": Path, "required": True, "metavar": "PROFILE.json"}
    add("-o", "--output", **path, help="file to write")
    add("--dtype", choices=TRAINED_TYPES, help=_CONVERT)
    batch = "size of the largest microbatch in samples (default: batch of the example inputs)"
    add("--batch", type=integer(1, INT32), metavar="B", help=batch)
    repeats = f"number of repetitions; the median time is used (default: {_REPEATS})"
    add("--repeats", type=positive, default=_REPEATS, metavar="R", help=repeats)
    return parser


def _profile(job: Job, options: Namespace, settings: Sequence[str]) -> None:
    job.from_root(lambda: need("partition profile", "torch", "networkx"))
    import torch

    from hpc3d.comm.cartesian import build_stages
    from hpc3d.partition.execution import torch_device
    from hpc3d.partition.profiles.one_rank_run import OneRankRun
    from hpc3d.partition.profiles.processor import processor_of

    torch.set_num_threads(1)
    asked = job.from_root(lambda: _configuration(settings))
    torch_device.refuse_without_cuda(job, asked)
    made = job.on_root(lambda: _made(options, asked)) or _made(options, asked)
    captured, module, inputs, config = made
    hardware = torch_device.torch_hardware(job, config)
    for line in hardware.lines:
        _say(job, line)
    mesh, _ = build_stages([1] * job.size, 1, hardware.transport, hardware.device)
    if hardware.device:
        torch_device.use_device(job, hardware.device, mesh.pool, config.train.tf32)
    processor = processor_of(job, hardware.device)
    batch = options.batch or captured.batch
    run = job.on_all_ranks(
        lambda: OneRankRun(captured, module, inputs, batch, processor.clock, mesh.pool)
    )
    profile = _measured(job, run, mesh, processor, options)
    job.from_root(lambda: _write(profile, options.output))


def _configuration(settings: Sequence[str]) -> Config:
    """Return the configuration with the keys on the command line."""
    from hpc3d.config import load

    for option, _ in load.options(settings):
        if option.removeprefix("--") not in _KEYS:
            keys = ", ".join(_KEYS)
            raise ValueError(f"{option}: not supported by partition profile; use only {keys}")
    return load.load(None, settings)


def _made(options, config):
    """Return the captured module, the module, its inputs, and the configuration with its type."""
    from hpc3d.config.resolve import refuse
    from hpc3d.config.rules import unknown_values
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.execution.staged_model import check_types
    from hpc3d.partition.factory import made_with_data

    captured = captured_of(options.model, options.dtype)
    train = replace(config.train, dtype=check_types(captured))
    config = replace(config, train=train)
    refuse([*unknown_values(config)])
    return captured, *made_with_data(options.model, 0, options.dtype), config


def _measured(
    job: Job, run: OneRankRun, mesh: Mesh, processor: Processor, options: Namespace
) -> ModuleProfile:
    from hpc3d.partition.measured_profile import ModuleProfile
    from hpc3d.partition.plan_file import digest_of, names_of
    from hpc3d.partition.profiles.measurement import (
        measured_pieces,
        measured_run,
        sizes,
        timed_calls,
    )

    rows, repeats, found = sizes(run.batch), options.repeats, []
    _say(job, "   rows   forward [s]  backward [s]     samples/s")
    for count, values in zip(rows, measured_pieces(run, rows, repeats, processor.usage)):
        found.append(np.mean(job.gather(values), 0))
        times = found[-1][:2].sum(1)
        _say(job, f"{count:7d}  {times[0]:12.6g}  {times[1]:12.6g}  {count / times.sum():12.6g}")
    constants = job.gather(measured_run(run, repeats))
    constants = {name: float(np.mean([each[name] for each in constants])) for name in constants[0]}
    _show(job, constants)
    by_piece = np.transpose(found, (2, 1, 0))  # [piece, quantity, rows]
    return ModuleProfile(
        model=options.model,
        graph=digest_of(run.captured),
        host=job.location()["host"],
        ranks=job.size,
        cores=len(os.sched_getaffinity(0)),
        memory=processor.memory,
        rows=rows,
        pieces=dict(zip(names_of(run.captured), by_piece.tolist(), strict=True)),
        run=constants,
        calls=timed_calls(job, mesh.comm("p"), repeats, processor.wall),
        device=processor.name,
    )


def _say(job, line):
    if job.rank == 0:
        print(line, flush=True)


def _show(job, constants):
    part = f"{constants['forward'] * 1e6:.3g} and {constants['backward'] * 1e6:.3g} us"
    _say(job, f"overhead of a model chunk, forward and backward: {part}")
    step = f"{constants['step'] * 1e3:.3g} ms"
    _say(job, f"overhead of a step: {step}; update: {constants['update'] * 1e9:.3g} ns per byte")


def _write(profile, path):
    with replacing(path) as temporary:
        temporary.write_text(profile.text(), "utf-8")


if __name__ == "__main__":
    sys.exit(main())
