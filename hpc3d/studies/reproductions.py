"""Entry points of the commands that reproduce published results.

The published results are the findings on pipeline and data parallelism, step times on H100, A100
and V100 GPUs, speedups of 3-D tensor parallelism, vTrain step times, and RaNNC plans.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc3d.config.package_data import shipped

if TYPE_CHECKING:
    from argparse import Namespace

_ROWS = "published/vtrain-single.csv.gz", "published/vtrain-multi.csv.gz"
_VTRAIN = "machines/a100-vtrain.toml"


def findings(options: Namespace) -> dict[str, Any]:
    from hpc3d.studies.pp_vs_dp import figures, findings

    found = findings.main(options)
    figures.write(found, Path(options.out) / "findings")
    return found


def published(options: Namespace) -> dict[str, Any]:
    from hpc3d.studies import published_report

    return published_report.main(options)


def speedups(options: Namespace) -> dict[str, Any]:
    from hpc3d.studies import tensor_3d as speedups

    return speedups.main(options)


def vtrain(options: Namespace) -> dict[str, Any]:
    from hpc3d.studies.vtrain_report import report

    return report(*map(shipped, _ROWS), options.machine or shipped(_VTRAIN))


def partition(options: Namespace) -> dict[str, Any]:
    from hpc3d.runtime.optional_packages import need

    need("partition", "networkx", "torch")
    from hpc3d.studies import rannc_experiments

    return rannc_experiments.main(options)
