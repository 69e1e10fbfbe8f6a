"""Measure what the code itself costs, in pairs; predict what others have measured.

    python -m hpc3d.bench NAME ... [--rounds N] [--machine FILE] [--out DIR] [--json]

    overhead   a step on 64 ranks against one rank with all cores
    step       a step on one rank, one thread, against the same model in torch, eager
    trace      a step with and without the trace
    overlap    the reduction of gradients over the data axis, while backward runs and after it
    schemes    the loss and the bytes of four schemes on 64 ranks, in one figure
    guards     steps whose products and messages are checked, on 1, 8 and 64 ranks; replicas

    calls      alone, as `mpirun -np N python -m hpc3d.bench calls`: collectives over the N ranks,
               by size, as they are made here and as MPI makes them

    calibrate  this machine, from runs of up to 8 ranks: which `--machine this-machine` then is;
               with --check, steps of 12 other runs, measured and predicted
    plans      plans of torch modules, by a profile of this machine, on 1 and 2 ranks: steps
               predicted and measured, and whether the chosen plan is the fastest
    findings   when a pipeline beats replicas, what a poor partition holds, the size of messages,
               waiting against transfer: tables, and figures in DIR/findings
    published  steps of Megatron-LM (arXiv:2205.05198, arXiv:2104.04473) on A100
    speedups   3-D over 1-D and 2-D on 64 V100 (arXiv:2105.14450)
    vtrain     the published rows of vTrain (arXiv:2312.12391), a tenth of them to calibrate
    partition  RaNNC's experiments (arXiv:2103.16063) on 32 V100: BERT and ResNet of many sizes, by
               our plan and those of others; some tens of minutes, with --quick a few

Ratios are medians of pairs that ran one after the other; single times say little on a machine
that is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpc3d.config.argument_types import positive
from hpc3d.console.command_line import Parser, run
from hpc3d.runtime import environment, launch

if TYPE_CHECKING:
    from argparse import Namespace

_MODULES = {
    "benchmarks.overheads": ("overhead", "step", "trace", "overlap", "schemes"),
    "benchmarks.guards": ("guards",),
    "benchmarks.calls": ("calls",),
    "benchmarks.calibration": ("calibrate",),
    "benchmarks.planned_runs": ("plans",),
    "studies.reproductions": ("findings", "published", "speedups", "vtrain", "partition"),
}
_BENCHMARKS = {name: module for module, names in _MODULES.items() for name in names}
_SINGLE = {"step", "trace", "calibrate"}  # run in this process, with one thread


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.names == ["calls"]:
        return launch.run("bench", lambda job: _benchmark("calls")(job, options))
    if _SINGLE & {*options.names}:  # before NumPy is loaded
        os.environ |= dict.fromkeys(environment.THREAD_VARIABLES, "1")
    return run("bench", lambda: _measure(options))


def _measure(options: Namespace) -> None:
    found = {name: _benchmark(name)(options) for name in options.names}
    if options.json:
        print(json.dumps(found))


def _parser():
    parser = Parser("bench", __doc__)
    add = parser.add_argument
    add("names", nargs="+", action=Names, choices=_BENCHMARKS, metavar="NAME")
    add("--rounds", type=positive, default=0, metavar="N", help="pairs (default: a few)")
    add("--out", default="results", metavar="DIR", help="folder of the figures")
    add("--machine", metavar="NAME|FILE", help="what predicts, or the file that calibrate writes")
    add("--transport", default="auto", help="mesh.transport of the runs (calibrate)")
    add("--check", action="store_true", help="predict other runs (calibrate)")
    add("--quick", action="store_true", help="a few of the models (partition)")
    add("--json", action="store_true", help="one JSON object on the last line")
    return parser


class Names(argparse.Action):
    """Argparse action for benchmark names; `calls`, which needs mpirun, excludes the others."""

    def __call__(self, parser, options, names, option=None):
        if "calls" in names and len(names) > 1:
            parser.error("calls runs on the ranks of mpirun, the others do not: ask for it alone")
        options.names = names


def _benchmark(name: str) -> Callable[..., Any]:
    """Import and return the function of a benchmark."""
    return getattr(import_module(f"hpc3d.{_BENCHMARKS[name]}"), name)


if __name__ == "__main__":
    sys.exit(main())
