"""Which worker of pytest-xdist runs what: files whose tests start jobs go to one of them, as long
as there are others.  Jobs take turns (tests/mpi.py): two workers would wait for each other."""

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

STARTS_JOBS = re.compile(
    r"from tests\.(mpi|runs|documented\.scripts) import .*\b(mpirun|checked|train|played)\b"
)
ROOT = Path(__file__).parent.parent


@cache
def starts_jobs(file):
    return bool(STARTS_JOBS.search((ROOT / file).read_text(encoding="utf-8")))


class JobsOnOneWorker(LoadFileScheduling):
    """Hands out whole files."""

    def _assign_work_unit(self, node):
        mine = node is next(iter(self.assigned_work))
        files = (file for file in self.workqueue if starts_jobs(file) == mine)
        if (file := next(files, None)) is not None:
            self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)
