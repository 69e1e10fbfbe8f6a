"""Distribution of tests over the workers of pytest-xdist, and their order.

A unit of work is a file, or one test function of a slow file. The longest units come first, so
that both workers end together. Units that start MPI jobs go to one worker, as long as there are
others, because jobs take turns (tests/mpi.py), and two workers would wait for each other.
"""

import re
from collections import Counter
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

from tests.strided import costs

STARTS_JOBS = re.compile(
    r"from tests\.(mpi|jobs|runs|documented\.scripts) import "
    r".*\b(mpirun|checked|train|output_of|Case)\b"
)
ROOT = Path(__file__).parent.parent
LONG = 60  # CPU seconds of a file whose functions are units of their own


@cache
def starts_jobs(unit):
    return bool(STARTS_JOBS.search((ROOT / file_of(unit)).read_text(encoding="utf-8")))


def file_of(unit):
    return unit.partition("::")[0]


class LongestFirst(LoadFileScheduling):
    """Scheduler that hands out units of work, longest first."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self.costs = Counter(costs())
        for function, seconds in [*self.costs.items()]:
            self.costs[file_of(function)] += seconds

    def _split_scope(self, nodeid):
        file = file_of(nodeid)
        return nodeid.partition("[")[0] if self.costs[file] > LONG else file

    def _assign_work_unit(self, node):
        mine = node is next(iter(self.assigned_work))
        unit = max(self.workqueue, key=lambda each: (starts_jobs(each) == mine, self.costs[each]))
        self.workqueue.move_to_end(unit, last=False)
        super()._assign_work_unit(node)
