"""How a job starts and ends: threads, yielding, one clear line for bad input, no rank left behind.

Nothing here imports NumPy or MPI before `set_environment` has run: both read the environment when
they are loaded.
"""

from __future__ import annotations

import errno
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from hpc3d.plain import lines_of, plain, plain_streams, why
from hpc3d.runtime.environment import (
    LOCAL_RANK,
    OWN_RANK,
    WORLD_RANKS,
    mpi_environment,
    number_in,
    set_environment,
)
from hpc3d.runtime.exit_codes import (
    BAD_INPUT,
    FAILED,
    INTERRUPTED,
    STALLED,
    BadData,
    JobExit,
)
from hpc3d.runtime.fork import fork_or_end
from hpc3d.runtime.stop_request import ENDING, ended_by

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EIO,
    errno.ESTALE,
)
_MEETING = 60  # seconds until the first message; MPI has been initialised everywhere before
_SPOKEN = 0.5  # seconds until what is printed has left the host
_ASKING = (signal.SIGUSR1, signal.SIGUSR2)  # for the end of a job: run.signal
_POKE = signal.SIGURG  # of our own, for the main thread; ignored by default
_BUSY_ALONE = 5  # seconds that the main thread has for a call of BLAS or HDF5
_BUSY = 0.1  # the same if a launcher will kill this process soon
_SAVED = 60  # seconds that a copy of this process has to save what can be saved


def run(name: str, body: Callable[[Job], int | None]) -> int:
    """`_started(name, body)`, whose output is plain text."""
    with plain_streams():
        try:
            return _started(name, body)
        except KeyboardInterrupt:  # before there is a job
            print(f"hpc3d.{name}: {ended_by(signal.SIGINT)}", file=sys.stderr)
            return INTERRUPTED


def _started(name: str, body: Callable[[Job], int | None]) -> int:
    """`body(job)` on every rank of the job; its exit code, or the end of the whole job.

    An end that all ranks agree on (`JobExit`) is the same exit code everywhere.  Anything else
    that goes wrong on one rank is printed once, with its rank, and aborts the job after
    `job.exit_hooks` has been called."""
    begin = time.monotonic()
    set_environment()
    early = []  # before there is a job
    for number in _ASKING:
        signal.signal(number, lambda number, _: early.append(number))
    with _starting(name), mpi_environment():
        try:
            from hpc3d.runtime.job import Job
        except (ImportError, RuntimeError) as error:  # the latter: there is mpi4py and no MPI
            reason = plain(str(error).partition("\n")[0]).rstrip(".")
            print(f"hpc3d.{name}: {reason}; python -m hpc3d.doctor says why", file=sys.stderr)
            return BAD_INPUT
        job = _met(lambda: Job(name, begin), name)
    sys.excepthook = lambda kind, error, trace: _die(job, error)
    threading.excepthook = lambda args: _die(job, args.exc_value)
    obey_signals(job)
    job.signals += early
    try:
        meant = number_in(WORLD_RANKS, default=1)
        if job.size == 1 and meant > 1:
            job.refuse(*(_explain_single(meant) if number_in(OWN_RANK, default=0) == 0 else ()))
        if same := job.namesakes():
            job.refuse(same)
        code = body(job)
    except JobExit as end:
        return end.code
    except SystemExit as error:
        code = error.code
    except BaseException as error:
        _die(job, error)
    if code:
        _die(job, SystemExit(code))
    return 0


def _starting(name: str) -> AbstractContextManager[None]:
    """Rank 0 says so where it takes long until all ranks are there."""
    ranks = number_in(WORLD_RANKS, default=1)
    if ranks == 1 or number_in(OWN_RANK, default=0):
        return nullcontext()
    from hpc3d.patience import patience

    return patience(name, f"{ranks} ranks start")


def _met(make: Callable[[], Job], name: str) -> Job:
    """The job that `make()` makes with its first call among all ranks; where that does not end,
    as between hosts that do not reach each other, this process says so and ends all of them.  It
    must not just leave: the ranks that it did reach would end with Open MPI's own error."""
    from hpc3d.runtime.job import end_job

    def end():
        if not number_in(LOCAL_RANK, default=0):
            line = f"in {_MEETING} s {os.uname().nodename} has not heard from all other hosts; "
            line += "mpirun ... python -m hpc3d.doctor says which do not reach each other"
            print(f"hpc3d.{name}: {line}", file=sys.stderr, flush=True)
        time.sleep(_SPOKEN)
        end_job(STALLED)

    alarm = threading.Timer(_MEETING, end)
    alarm.daemon = True
    alarm.start()
    try:
        return make()
    finally:
        alarm.cancel()


def _explain_single(meant: int) -> list[str]:
    """Why this process is alone although the launcher meant `meant` of them."""
    from hpc3d.runtime.mpi_library import mismatch_report

    return [f"{meant} processes were meant, but MPI sees 1", *mismatch_report(meant)]


def _die(job: Job, error: BaseException) -> None:
    """Say what happened on this rank, once for the job, save what can be saved, end the job."""
    if job.first_to_fail():
        job.complain(f"rank {job.rank} {what_happened(error, job.name)}")
    finish(job)
    job.abort(_exit_code(error))


def what_happened(error: BaseException, command: str = "train") -> str:
    """What a rank says of the error that ends it."""
    again = "start again" + ", or go on with --resume" * (command == "train")
    if isinstance(error, SystemExit):
        return f"exited with {plain(str(error.code))}"
    what = plain(str(error))
    if isinstance(error, BadData):
        return f"failed: {what}; then {again}"
    if isinstance(error, OSError) and error.errno in _DISK:
        where = f": {plain(str(error.filename))}" if error.filename else ""
        return f"failed: {plain(why(error))}{where}; fix that, then {again}"
    if isinstance(error, MemoryError):
        return (
            f"failed: out of memory ({what}); use more ranks, parallel.zero, parallel.recompute, "
            "parallel.offload or more parallel.microbatches (python -m hpc3d.plan finds what fits)"
        )
    return "failed\n" + "".join(traceback.format_exception(error))


def _exit_code(error: BaseException) -> int:
    code = getattr(error, "code", None)
    return code if isinstance(error, SystemExit) and isinstance(code, int) else FAILED


def obey_signals(job: Job) -> None:
    """End this rank at a signal of ENDING, or save what can be saved.

    The first signal of `job.requests` asks the job to stop by itself: this rank saves its trace
    now, and continues.  At a second signal, or at any other one, it ends.

    Python calls signal handlers on the main thread only, which may wait inside MPI forever.
    Therefore a thread reads the signals from a pipe.  It acts itself while the main thread
    communicates.  Otherwise the main thread acts, between two bytecodes: a copy of this process
    that is made during a product of BLAS or a call of HDF5 would hang.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    saved = threading.Lock()

    def act():
        asked = [number for number in job.signals if number in ENDING]
        if _must_end(job, asked):
            leave(job, asked[-1])
        elif asked and saved.acquire(blocking=False):
            _keep(job)

    def listen():
        while True:
            (number,) = os.read(told, 1)
            if number == _POKE:
                continue
            job.signals.append(number)
            if number in ENDING:
                _call_where_safe(job, act)

    for number in (*_ASKING, *ENDING):
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, lambda *_: None)  # at its default a signal ends the process
    signal.signal(_POKE, lambda *_: act())
    signal.set_wakeup_fd(tell)
    threading.Thread(target=listen, daemon=True).start()


def _must_end(job: Job, signals: list[int]) -> bool:
    """Whether these signals leave no time to stop after the current step."""
    asked = [number for number in signals if number in ENDING]
    return len(asked) > 1 or any(number not in job.requests for number in asked)


def _call_where_safe(job: Job, act: Callable[[], None]) -> None:
    """Call `act()` on this or on the main thread, until this process ends if it must."""
    last = time.monotonic() + (_BUSY_ALONE if job.size == 1 else _BUSY)
    while True:
        if _in_a_call() or time.monotonic() > last:
            act()
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, _POKE)
        if not _must_end(job, job.signals):
            return
        time.sleep(0.05)


def _in_a_call() -> bool:
    """Whether the main thread is in communication, and hence in no product of BLAS."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    # torch.fx compiles functions in namespaces without a name.
    module = frame.f_globals.get("__name__") or ""
    return module.startswith(("hpc3d.comm.", "hpc3d.runtime."))


def leave(job: Job, number: int = signal.SIGTERM) -> None:
    """End this process because of a signal, unless it is ending already."""
    if job.ending.acquire(blocking=False):
        os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)  # the main thread, which may be spinning
        _report_end(job, number)
        save_in_child(job)
        time.sleep(1)
        os._exit(128 + number)


def _report_end(job: Job, number: int) -> None:
    """Print what ended this process, if no launcher does."""
    if job.size == 1:
        with suppress(RuntimeError):  # the signal came while this thread was printing
            job.complain(ended_by(number))


def _keep(job: Job) -> None:
    """Save what can be saved now: this process may be killed before it has stopped."""
    if job.exit_hooks and job.ending.acquire(blocking=False):
        try:
            child = save_in_child(job)
            while not os.waitpid(child, os.WNOHANG)[0]:
                if _must_end(job, job.signals):  # the child continues without this process
                    _report_end(job, job.signals[-1])
                    os._exit(128 + job.signals[-1])
                time.sleep(0.01)
        finally:
            job.ending.release()


def save_in_child(job: Job) -> int:
    """Do what is to be done at the end of the job, in a process with a session of its own.

    Open MPI's launcher kills its processes a quarter of a second after SIGTERM, or as soon as one
    of them has gone; this one has the time to finish.
    """
    child = fork_or_end()
    if child == 0:
        os.setsid()
        signal.alarm(_SAVED)  # ends a wait for a lock that another thread of the parent holds
        _call_all(job)
        os._exit(0)
    return child


def finish(job: Job) -> None:
    """Do what the job wants done at its end, once."""
    with job.ending:
        _call_all(job)


def _call_all(job: Job) -> None:
    """Call the functions of `job.exit_hooks`; nothing may stop us here."""
    while job.exit_hooks:
        try:
            job.exit_hooks.pop(0)()
        except Exception as error:
            if job.first_to_fail():
                job.complain(f"rank {job.rank}: at the end: {'; '.join(lines_of(error))}")


def watch(seconds: float) -> None:
    """Print every thread's stack and end the process unless called again within `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def unwatch() -> None:
    faulthandler.cancel_dump_traceback_later()
