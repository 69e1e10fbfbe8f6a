"""Runs cases of tests/jobs.py on a rank: MODULE TRANSPORT CASE ... calls `MODULE.case`."""

import faulthandler
import sys
from importlib import import_module

from hpc3d.runtime import launch

LIMIT = 200  # seconds that a case may take before its ranks print where they are and exit
DONE = "done: "


def body(job):
    module, transport, *names = sys.argv[1:]
    case = import_module(module).case
    for name in names:
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        case(job, transport, name)
        job.barrier()
        faulthandler.cancel_dump_traceback_later()
        if job.rank == 0:
            print(DONE, name, sep="", flush=True)


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
