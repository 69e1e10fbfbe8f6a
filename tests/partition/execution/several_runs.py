"""Run several plans in one job: WORDS, the common options as JSON, and then each PLAN.json. The
folder of a run is next to its plan."""

import json
import sys
from pathlib import Path

from hpc3d.partition.execution.module_run import run
from hpc3d.runtime import launch


def body(job):
    words, *plans = sys.argv[1:]
    for plan in map(Path, plans):
        run(job, [str(plan), *json.loads(words), "--run.out", str(plan.with_suffix(""))])


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
