"""Measure the overhead of hpc3d, and predict published measurements.

    python -m hpc3d.bench NAME ... [--rounds N] [--machine FILE] [--out DIR] [--json]

    overhead   step time on 64 ranks, compared with one rank on all cores
    step       step time on one rank with one thread, compared with the same model in eager PyTorch
    trace      step time with and without tracing
    overlap    step time with and without overlap of gradient reduction, weights and activations
    schemes    loss and communication volume of four tensor-parallel schemes on 64 ranks
    guards     overhead of checking matrix products, messages and replicas on 1, 8 and 64 ranks

    calls      time of the collectives of hpc3d and of MPI by message size; run it separately:
               mpirun -np N python -m hpc3d.bench calls

    calibrate  measure this machine with runs on up to 8 ranks, for `--machine this-machine`;
               --check also predicts and measures the steps of 12 other runs
    scaling    weak and strong scaling of 1-D, 2-D, 2.5-D and 3-D tensor parallelism, predicted and
               measured; has its own options: python -m hpc3d.bench scaling --help
    peers      step times of hpc3d and of PyTorch's DDP, FSDP2, DTensor and pipelining; has its own
               options: python -m hpc3d.bench peers --help
    plans      plans for PyTorch modules on 1 and 2 ranks, from a profile of this machine:
               predicted and measured step times, and whether the chosen plan is the fastest
    planners   plans for PyTorch modules on 2 ranks by hpc3d, RaNNC and GPipe, from a profile of
               this machine: predicted and measured step times
    findings   the four findings of arXiv:2407.02081 on pipeline and data parallelism, reproduced
               as tables and figures in DIR/findings; with --measure, small runs on up to 2 ranks
               of this machine, measured and predicted
    published  predicted and published step times on H100, A100 and V100
               (docs/published-steps.md), and times and memory of parts of Megatron-LM steps
    speedups   predicted and published speedups of 3-D over 1-D and 2-D on 64 V100
               (arXiv:2105.14450)
    vtrain     predicted and published step times of vTrain (arXiv:2312.12391); a tenth of the
               published rows is used for calibration
    partition  RaNNC's experiments on 32 V100 (arXiv:2103.16063): BERT and ResNet of many sizes,
               partitioned by hpc3d and by others; takes tens of minutes, or a few with --quick

Ratios are medians over pairs of consecutive runs. On a busy machine, single times vary too much.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from hpc3d.config.argument_types import positive
from hpc3d.console.command_line import Parser, run
from hpc3d.runtime import environment, launch

if TYPE_CHECKING:
    from argparse import Namespace

_PREDICTIONS = ("findings", "published", "speedups", "vtrain", "partition")
_MODULES = {
    "benchmarks.overheads": ("overhead", "step", "trace", "overlap", "schemes"),
    "benchmarks.guards": ("guards",),
    "benchmarks.calls": ("calls",),
    "benchmarks.calibration": ("calibrate",),
    "benchmarks.planned_runs": ("plans", "planners"),
    "studies.reproductions": _PREDICTIONS,
}
_BENCHMARKS = {name: module for module, names in _MODULES.items() for name in names}
_MEASURED = {"findings": "benchmarks.measured_findings"}  # with --measure
_STUDIES = {"scaling": "benchmarks.scaling.study", "peers": "benchmarks.peers"}  # own parsers
_SINGLE = {"step", "trace", "calibrate"}  # benchmarks that run in this process, with one thread


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words and (name := _STUDIES.get(words[0])):
        study = import_module(f"hpc3d.{name}")
        options, overrides = study.parser().parse_known_args(words[1:])
        return run("bench", lambda: study.main(options, overrides))
    options = parser().parse_args(words)
    if options.names == ["calls"]:
        return launch.run("bench", lambda job: _benchmark("calls")(job, options))
    if _SINGLE & {*options.names}:  # NumPy reads these variables when it is loaded
        os.environ |= dict.fromkeys(environment.THREAD_VARIABLES, "1")
    return run("bench", lambda: _measure(options))


def _measure(options: Namespace) -> None:
    from hpc3d.benchmarks.harness import watched

    predicted = {*_PREDICTIONS} - ({*_MEASURED} if options.measure else set())
    measured = not predicted.issuperset(options.names)
    with watched() if measured else nullcontext({}) as load:
        found = {name: _benchmark(name, options.measure)(options) for name in options.names}
    if options.json:
        print(json.dumps(found | load))


def parser() -> Parser:
    """Return the command-line parser."""
    parser = Parser("bench", __doc__)
    add = parser.add_argument
    text = "name of a benchmark listed above"
    add("names", nargs="+", action=Names, choices=_BENCHMARKS, metavar="NAME", help=text)
    text = "number of pairs of runs to measure (default: depends on the benchmark)"
    add("--rounds", type=positive, default=0, metavar="N", help=text)
    text = "folder for the figures (default: results)"
    add("--out", default="results", metavar="DIR", help=text)
    text = "machine to use for predictions; calibrate: machine file to write"
    add("--machine", metavar="NAME|FILE", help=text)
    text = "calibrate: value of mesh.transport for the calibration runs"
    add("--transport", default="auto", help=text)
    text = "calibrate: validate the fitted machine model on additional runs"
    add("--check", action="store_true", help=text)
    text = "findings: measure small runs on this machine instead, and compare predictions"
    add("--measure", action="store_true", help=text)
    add("--quick", action="store_true", help="partition: include only 3 BERT and 2 ResNet models")
    add("--json", action="store_true", help="print one JSON object on the last line")
    return parser


class Names(argparse.Action):
    """Argparse action for benchmark names, which rejects `calls` in combination with others."""

    def __call__(self, parser, options, names, option=None):
        if "calls" in (names or ()) and len(names) > 1:
            parser.error("calls is run under mpirun and cannot be combined with other benchmarks")
        options.names = names


def _benchmark(name: str, measured: bool = False) -> Callable[..., Any]:
    module = _MEASURED.get(name) if measured else None
    return getattr(import_module(f"hpc3d.{module or _BENCHMARKS[name]}"), name)


if __name__ == "__main__":
    sys.exit(main())
