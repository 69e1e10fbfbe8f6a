"""Profile a torch module on this machine, so that the planner can use measured costs.

    python -m hpc3d.partition profile MODULE:FACTORY -o PROFILE.json
    mpirun -np N python -m hpc3d.partition profile MODULE:FACTORY -o PROFILE.json
    python -m hpc3d.partition MODULE:FACTORY --ranks N --profile PROFILE.json -o PLAN.json

The command runs forward and backward passes of the module with real data on a single core, in
microbatches of 1, 2, 4, ... samples up to the batch size. The command measures the time of every
operation, and the overhead of a model chunk, a step and an optimizer update. All N ranks measure
at the same time, because they also compute at the same time during training. With several ranks,
the command also measures messages and all-reduces. The module must return its loss.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hpc3d.config.argument_types import integer, positive
from hpc3d.config.limits import INT32, TRAINED_TYPES
from hpc3d.console.command_line import Parser
from hpc3d.console.small_files import replacing
from hpc3d.runtime import host_memory, launch
from hpc3d.runtime.optional_packages import need

if TYPE_CHECKING:
    from argparse import Namespace

    from hpc3d.partition.measured_profile import ModuleProfile
    from hpc3d.partition.profiles.one_rank_run import OneRankRun
    from hpc3d.runtime.job import Job

_REPEATS = 7
_CONVERT = "convert the module and its floating-point inputs to this data type"


def main(argv: list[str] | None = None) -> int:
    """Measure the module; return exit code 2 if it cannot be measured."""
    options = parser().parse_args(argv)
    return launch.run("partition", lambda job: _profile(job, options))


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


def _profile(job: Job, options: Namespace) -> None:
    job.from_root(lambda: need("partition profile", "torch", "networkx"))
    import torch

    torch.set_num_threads(1)
    run = job.on_root(lambda: _made(options)) or _made(options)
    profile = _measured(job, run, options)
    job.from_root(lambda: _write(profile, options.output))


def _made(options):
    from hpc3d.partition.capture import captured_of
    from hpc3d.partition.factory import made_with_data
    from hpc3d.partition.profiles.measurement import CLOCK
    from hpc3d.partition.profiles.one_rank_run import OneRankRun

    captured = captured_of(options.model, options.dtype)
    module, inputs = made_with_data(options.model, 0, options.dtype)
    return OneRankRun(captured, module, inputs, options.batch or captured.batch, CLOCK)


def _measured(job: Job, run: OneRankRun, options: Namespace) -> ModuleProfile:
    from hpc3d.comm.cartesian import build_stages
    from hpc3d.partition.measured_profile import ModuleProfile
    from hpc3d.partition.plan_file import digest_of, names_of
    from hpc3d.partition.profiles.measurement import (
        measured_pieces,
        measured_run,
        sizes,
        timed_calls,
    )

    rows, found = sizes(run.batch), []
    _say(job, "   rows   forward [s]  backward [s]     samples/s")
    for count, seconds in zip(rows, measured_pieces(run, rows, options.repeats)):
        found.append(np.mean(job.gather(seconds), 0))
        times = found[-1].sum(1)
        _say(job, f"{count:7d}  {times[0]:12.6g}  {times[1]:12.6g}  {count / times.sum():12.6g}")
    constants = job.gather(measured_run(run, options.repeats))
    constants = {name: float(np.mean([each[name] for each in constants])) for name in constants[0]}
    _show(job, constants)
    by_piece = np.transpose(found, (2, 1, 0))  # [piece, pass, rows]
    mesh, _ = build_stages([1] * job.size, 1)
    return ModuleProfile(
        model=options.model,
        graph=digest_of(run.captured),
        host=job.location()["host"],
        ranks=job.size,
        cores=len(os.sched_getaffinity(0)),
        memory=host_memory.total() / len(os.sched_getaffinity(0)),
        rows=rows,
        pieces=dict(zip(names_of(run.captured), by_piece.tolist(), strict=True)),
        run=constants,
        calls=timed_calls(job, mesh.world, options.repeats),
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
