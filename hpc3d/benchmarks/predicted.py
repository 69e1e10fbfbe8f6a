"""What is predicted: findings, published steps, and the speed-ups of the 3-D paper."""

from pathlib import Path

from hpc3d.shipped import shipped

ROWS = "published/vtrain-single.csv.gz", "published/vtrain-multi.csv.gz"
VTRAIN = "machines/a100-vtrain.toml"


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

    return report(*map(shipped, ROWS), options.machine or shipped(VTRAIN))
