"""What is predicted: findings, published steps, and the speed-ups of the 3-D paper."""

from pathlib import Path

INPUTS = Path(__file__).parents[2] / "inputs"
ROWS = [INPUTS / "published" / name for name in ("vtrain-single.csv.gz", "vtrain-multi.csv.gz")]
VTRAIN = INPUTS / "machines" / "a100-vtrain.toml"


def findings(options):
    from hpc3d.analyze import findings_figures
    from hpc3d.predict import findings

    found = findings.main(options)
    findings_figures.write(found, Path(options.out) / "findings")
    return found


def published(options):
    from hpc3d.predict import published_report

    return published_report.main(options)


def speedups(options):
    from hpc3d.predict import speedups

    return speedups.main(options)


def vtrain(options):
    from hpc3d.predict.vtrain_report import report

    return report(*ROWS, options.machine or VTRAIN)
