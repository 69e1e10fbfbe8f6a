"""How a job starts and ends: threads, yielding, one clear line for bad input, no rank left behind.

Nothing here imports NumPy or MPI before `set_environment` has run: both read the environment when
they are loaded.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback

BAD_INPUT = 2
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_TASKS_PER_NODE")
WORLD_RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class Refused(Exception):
    """Bad input that all ranks know of; rank 0 has said what it is."""


def number_in(names):
    """The first number that an environment variable of `names` begins with, or 1."""
    for name in names:
        digits = os.environ.get(name, "").split("(")[0].split(",")[0]
        if digits.isdigit():
            return int(digits)
    return 1


def set_environment():
    """Share the node's cores among its ranks; let waiting ranks yield where cores are fewer."""
    cores, ranks = len(os.sched_getaffinity(0)), number_in(LOCAL_RANKS)
    bound = cores < (os.cpu_count() or 1)
    threads = cores if bound else max(1, cores // ranks)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, str(threads))
    if ranks > (os.cpu_count() or 1):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def run(name, body):
    """`body(job)` on every rank of the job; its exit code, or the end of the whole job.

    Bad input that all ranks agree on is exit code 2 everywhere.  Anything else that goes wrong on
    one rank is printed once, with its rank, and aborts the job after `job.at_end` has been called.
    """
    set_environment()
    from hpc3d.cluster.job import Job

    job = Job(name)
    sys.excepthook = lambda kind, error, trace: die(job, error)
    threading.excepthook = lambda args: die(job, args.exc_value)
    signal.signal(signal.SIGTERM, lambda *_: leave(job, 128 + signal.SIGTERM))
    try:
        meant = number_in(WORLD_RANKS)
        if job.size == 1 and meant > 1:
            job.refuse(explain_single(meant))
        code = body(job) or 0
    except Refused:
        return BAD_INPUT
    except BaseException as error:
        die(job, error)
    if code:
        die(job, SystemExit(code))
    return 0


def explain_single(meant):
    """Why this process is alone although the launcher started `meant` of them."""
    return (
        f"the launcher started {meant} processes, but MPI sees 1: it was not built for this "
        "launcher; use `srun --mpi=pmix`, or the mpirun that belongs to mpi4py's MPI"
    )


def die(job, error):
    """Say what happened on this rank, once for the job, save what can be saved, end the job."""
    code = error.code if isinstance(error, SystemExit) else 1
    if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    if not isinstance(error, SystemExit) and job.first_to_fail():
        lines = "".join(traceback.format_exception(error))
        print(f"hpc3d.{job.name}: rank {job.rank} failed\n{lines}", file=sys.stderr, flush=True)
    finish(job)
    job.abort(code if isinstance(code, int) else 1)


def leave(job, code):
    """End this rank alone: the launcher is already ending the job."""
    finish(job)
    os._exit(code)


def finish(job):
    """Call what the job wants done at its end; nothing may stop us here."""
    for function in job.at_end:
        try:
            function()
        except Exception as error:
            print(f"hpc3d.{job.name}: rank {job.rank}: at the end: {error}", file=sys.stderr)
    job.at_end.clear()


def watch(seconds):
    """Print every thread's stack and end the process unless called again within `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def unwatch():
    faulthandler.cancel_dump_traceback_later()
