"""Entry point of python -m hpc3d.partition run; see hpc3d.partition.execution.module_run."""

import sys
from collections.abc import Sequence

from hpc3d.runtime import launch
from hpc3d.runtime.optional_packages import need


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return launch.run("partition", lambda job: _run(job, [*words]))


def _run(job, words):
    job.from_root(lambda: need("partition run", "torch"))
    from hpc3d.partition.execution.module_run import run

    run(job, words)


if __name__ == "__main__":
    sys.exit(main())
