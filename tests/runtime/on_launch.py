"""Several ways in which a job ends: `on_launch.py MODE FOLDER` on the ranks of an MPI job.

Every rank writes a file to FOLDER when its clean-up is complete.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from hpc3d.console.sanitize import Problems
from hpc3d.runtime import launch


def environment(job):
    names = ("OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle")
    found = job.gather(" ".join(os.environ.get(name, "-") for name in names))
    if job.rank == 0:  # lines of two ranks may come in pieces
        print(*found, flush=True)


def fail(job):
    """One rank raises an exception, while the others wait for it inside MPI."""
    if job.rank == 1:
        raise RuntimeError("a message of rank 1")
    job.barrier()


def fail_all(job):
    """The first rank that fails prints its message after the other ranks have failed."""
    complain = job.complain
    job.complain = lambda text: time.sleep(1) or complain(text)
    raise RuntimeError("a message of all ranks")


def fail_in_thread(job):
    def work():
        raise RuntimeError("a message of a thread")

    if job.rank == 1:
        threading.Thread(target=work).start()
    job.comm.recv(source=1)


def leave_early(job):
    if job.rank == 1:
        sys.exit(3)
    job.barrier()


def return_code(job):
    if job.rank == 1:
        return 3
    job.barrier()


def leave_well(job):
    sys.exit(0)


def refuse(job):
    def wrong():
        raise Problems(["one.key = 1: remedy", "another.key = 2: remedy"])

    job.from_root(wrong)


def refuse_on_some(job):
    def wrong():
        if job.rank:
            raise ValueError("a.key = 1: remedy")

    job.on_all_ranks(wrong)


def agree(job):
    return 0 if job.from_root(lambda: (os.getpid(), job.rank))[1] == 0 else 1


def terminated(job, wait):
    """Rank 0 terminates rank 1, which waits in `wait`, as a launcher does."""
    pids = job.comm.allgather(os.getpid())
    if job.rank == 1:
        wait()
    time.sleep(0.3)  # it waits by now, as a rule
    os.kill(pids[1], signal.SIGTERM)
    time.sleep(1000)


def terminated_in_mpi(job):
    terminated(job, lambda: job.comm.recv(source=0))


def terminated_in_shared_memory(job):
    import numpy as np

    from hpc3d.comm.cartesian import build

    comm = build({"x": job.size}).comm("x")
    terminated(job, lambda: comm.all_gather(np.ones(3)).wait())


def terminated_at_work(job):
    terminated(job, lambda: sum(iter(lambda: 1, 0)))


def told_amid_products(job):
    """A job that can stop itself is told to end while BLAS computes with two threads, which do not
    survive a fork; what it saves is complete before it continues."""
    import numpy as np

    job.requests, a = {signal.SIGTERM}, np.ones((600, 600), np.float32)
    kept = Path(sys.argv[2], "kept")
    job.exit_hooks[:] = [kept.touch]
    for _ in range(20):
        launch.obey_signals(job)
        threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()
        while not (kept.exists() and job.signals):
            a @ a
        kept.unlink()
        job.signals.clear()
    return 0


def terminated_in_products(job):
    """The same situation, but the job cannot stop itself, so it ends."""
    import numpy as np

    a = np.ones((600, 600), np.float32)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    while True:
        a @ a


def interrupted_twice_in_products(job):
    """The first signal is a stop request; the second one arrives while the trace is saved."""
    job.requests = {signal.SIGINT, signal.SIGTERM}
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    terminated_in_products(job)


def interrupted_while_saving(job):
    """The second signal arrives while the forked copy of this process is still busy."""

    def linger():
        Path(sys.argv[2], str(os.getpid())).touch()
        time.sleep(1000)

    job.requests = {signal.SIGINT}
    job.exit_hooks.insert(0, linger)
    nameless = {"time": time}  # as torch.fx compiles functions
    for after in (0.2, 0.6):
        threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
    exec("while True: time.sleep(0.01)", nameless)


def unheard(job):
    """Rank 0 fails while the launcher is stopped, which is continued when this rank has ended."""
    launcher, here = os.getppid(), Path(f"/proc/{os.getpid()}/cmdline")
    if job.rank == 1:
        job.comm.recv(source=0)
    if os.fork() == 0:
        os.setsid()
        while here.read_bytes():  # empty when the process has ended, and nobody looked yet
            time.sleep(0.1)
        os.kill(launcher, signal.SIGCONT)
        os._exit(0)
    os.kill(launcher, signal.SIGSTOP)
    raise RuntimeError("a message of rank 0")


def at_end(job):
    def broken():
        raise OSError("no space left")

    def mark():
        time.sleep(0.2)
        Path(sys.argv[2], str(job.rank)).touch()

    job.exit_hooks += [mark] if sys.argv[1] == "return_code" else [broken, mark]


def body(job):
    at_end(job)
    code = globals()[sys.argv[1]](job)
    launch.finish(job)
    return code


if __name__ == "__main__":
    sys.exit(launch.run("test", body))
