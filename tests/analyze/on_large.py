"""Run every analysis of a large trace, and print the seconds and the peak memory as JSON.

python -m tests.analyze.on_large TRACE
"""

import json
import sys
import time

from hpc3d import trace
from hpc3d.analyze.metrics.breakdown import breakdown, imbalance_rows, memory_rows, rank_rows
from hpc3d.analyze.metrics.collectives import bandwidth_rows, communication_matrix
from hpc3d.analyze.metrics.compare import difference_rows, run_row
from hpc3d.analyze.metrics.critical_path import critical_path
from hpc3d.analyze.metrics.mfu import efficiency_row
from hpc3d.analyze.metrics.stragglers import straggler_rows
from hpc3d.analyze.metrics.wait_states import calls_of, incomplete, wait_rows
from tests.memory import peak_bytes

seconds = {}


def timed(function, *arguments):
    start = time.perf_counter()
    result = function(*arguments)
    seconds[function.__name__] = time.perf_counter() - start
    return result


with trace.open(sys.argv[1]) as opened:
    calls = timed(calls_of, opened)
    timed(breakdown, opened, ("category", "phase", "axis", "op", "layer"))
    timed(rank_rows, opened, calls)
    timed(imbalance_rows, opened)
    timed(memory_rows, opened)
    timed(wait_rows, calls)
    timed(incomplete, calls)
    timed(straggler_rows, calls)
    timed(critical_path, opened, calls, 4)
    timed(communication_matrix, calls)
    timed(bandwidth_rows, calls)
    timed(efficiency_row, opened)
    timed(difference_rows, opened, opened)
    timed(run_row, opened)
    print(
        json.dumps({"events": len(opened.events), "seconds": seconds, "peak_bytes": peak_bytes()})
    )
