"""Start and end a job: set the environment, handle signals and errors, and stop all ranks.

This module imports NumPy and MPI only after `set_environment`, because both read the environment
when they are loaded.
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

from hpc3d.console import command_line
from hpc3d.console.exit_codes import BAD_INPUT, FAILED, INTERRUPTED, STALLED, BadData, JobExit
from hpc3d.console.sanitize import (
    OutputError,
    file_and_reason,
    lines_of,
    reason_of,
    sanitized,
    sanitized_streams,
)
from hpc3d.runtime.environment import (
    LOCAL_RANK,
    OWN_RANK,
    WORLD_RANKS,
    mpi_environment,
    number_in,
    set_environment,
)
from hpc3d.runtime.fork import fork_or_end
from hpc3d.runtime.stop_request import ENDING, ended_by

if TYPE_CHECKING:
    from hpc3d.runtime.job import Job

_DISK = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO, errno.ESTALE
_MEETING = 60  # timeout in s of the first collective call
_SPOKEN = 0.5  # time in s to let the launcher forward printed output before an abort
_ASKING = (signal.SIGUSR1, signal.SIGUSR2)  # possible values of run.signal
_POKE = signal.SIGURG  # signal that wakes the main thread; ignored by default
_BUSY_ALONE = 5  # timeout in s for the main thread to return from a BLAS or HDF5 call
_BUSY = 0.1  # the same timeout with several ranks, which the launcher soon kills
_SAVED = 60  # timeout in s of the exit hooks in a forked child process


def run(name: str, body: Callable[[Job], int | None]) -> int:
    """Run `body(job)` on every rank with sanitized output; return the exit code."""
    with sanitized_streams():
        try:
            return _started(name, body)
        except KeyboardInterrupt:  # Ctrl-C before the job exists
            print(f"hpc3d.{name}: {ended_by(signal.SIGINT)}", file=sys.stderr)
            return INTERRUPTED


def show_help(name: str, body: Callable[[], None]) -> int:
    """Print a help text with `body()` on rank 0, without MPI; return the exit code."""
    return 0 if number_in(OWN_RANK, default=0) else command_line.run(name, body, patient=False)


def _started(name: str, body: Callable[[Job], int | None]) -> int:
    """Run `body(job)` on every rank; return the exit code, or abort the job.

    If all ranks raise `JobExit` together, they return its exit code.  Any other exception is
    printed once per host with its rank, and the job is aborted after the exit hooks have run.
    """
    begin = time.monotonic()
    set_environment()
    early = []  # signals received before the job exists
    for number in _ASKING:
        signal.signal(number, lambda number, _: early.append(number))
    with _starting(name), mpi_environment():
        try:
            from hpc3d.runtime.job import Job
        except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
            reason = sanitized(str(error).partition("\n")[0]).rstrip(".")
            print(f"hpc3d.{name}: {reason}; {_to_load(error)}", file=sys.stderr)
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


def _to_load(error: Exception) -> str:
    """Return advice on how to repair an installation whose MPI or other modules do not load."""
    from hpc3d.runtime.mpi_library import INSTALL, found

    if isinstance(error, ModuleNotFoundError):
        return "activate the environment of hpc3d (source .venv/bin/activate), or install hpc3d"
    doctor = "run python -m hpc3d.doctor to find the cause"
    return doctor if found() else f"{INSTALL.splitlines()[0]}, or {doctor}"


def _starting(name: str) -> AbstractContextManager[None]:
    """Return a context manager that shows progress on rank 0 while the ranks start."""
    ranks = number_in(WORLD_RANKS, default=1)
    if ranks == 1 or number_in(OWN_RANK, default=0):
        return nullcontext()
    from hpc3d.console.progress import progress

    return progress(name, f"starting {ranks} ranks")


def _met(make: Callable[[], Job], name: str) -> Job:
    """Create the job with `make()`; abort if its first collective call exceeds _MEETING seconds.

    The call does not complete if hosts cannot reach each other.  In this case, one rank per host
    prints a message, and all ranks are aborted.  The ranks do not simply exit, because ranks
    connected to an exited rank would fail with an Open MPI error.
    """
    from hpc3d.runtime.job import end_job

    def end():
        if not number_in(LOCAL_RANK, default=0):
            line = f"{os.uname().nodename} did not reach all other hosts within {_MEETING} s; "
            line += "run mpirun ... python -m hpc3d.doctor to see which hosts cannot connect"
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
    from hpc3d.runtime.mpi_library import mismatch_report

    return [f"{meant} processes were started, but MPI sees 1", *mismatch_report(meant)]


def _die(job: Job, error: BaseException) -> None:
    """Abort the job after an error on this rank.

    The error is printed if it is the first one on this host, and the exit hooks are called.
    """
    if job.first_to_fail():
        failed = f"rank {job.rank} {what_happened(error, job.name)}"
        job.complain(file_and_reason(error) if isinstance(error, OutputError) else failed)
    finish(job)
    job.abort(_exit_code(error))


def what_happened(error: BaseException, command: str = "train") -> str:
    """Return the error message for an exception that terminates a rank."""
    again = "start again" + ", or continue with --resume" * (command == "train")
    if isinstance(error, SystemExit):
        return f"exited with {sanitized(str(error.code))}"
    what = sanitized(str(error))
    if isinstance(error, BadData):
        return f"failed: {what}; then {again}"
    if isinstance(error, OSError) and error.errno in _DISK:
        where = f": {sanitized(str(error.filename))}" if error.filename else ""
        return f"failed: {sanitized(reason_of(error))}{where}; fix that, then {again}"
    if isinstance(error, MemoryError) and command == "partition":
        return (
            f"failed: out of memory ({what}); use parallel.offload, parallel.keep_dtype or "
            "parallel.zero, or make a plan with more --ranks, more --microbatches or --recompute "
            "full"
        )
    if isinstance(error, MemoryError):
        return (
            f"failed: out of memory ({what}); use more ranks, parallel.zero, parallel.recompute, "
            "parallel.offload or more parallel.microbatches (python -m hpc3d.plan finds layouts "
            "that fit)"
        )
    return "failed\n" + "".join(traceback.format_exception(error))


def _exit_code(error: BaseException) -> int:
    if isinstance(error, OutputError):
        return BAD_INPUT
    code = getattr(error, "code", None)
    return code if isinstance(error, SystemExit) and isinstance(code, int) else FAILED


def obey_signals(job: Job) -> None:
    """Install the signal handlers of this rank.

    The first signal in `job.requests` asks the job to stop.  If this signal is in ENDING, the rank
    also calls its exit hooks immediately in a child process, and continues.  A second signal in
    ENDING, or one that is not in `job.requests`, terminates the rank.

    Python calls signal handlers only on the main thread, which may be blocked inside MPI.
    Therefore, a separate thread reads the signals from a pipe.  While the main thread is
    communicating, the separate thread handles the signal.  Otherwise, the main thread handles the
    signal between two bytecodes, because a fork during a BLAS or HDF5 call would deadlock.
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
            signal.signal(number, lambda *_: None)  # by default, the signal ends the process
    signal.signal(_POKE, lambda *_: act())
    signal.set_wakeup_fd(tell)
    threading.Thread(target=listen, daemon=True).start()


def _must_end(job: Job, signals: list[int]) -> bool:
    """Return True if `signals` must end this process before it completes the current step."""
    asked = [number for number in signals if number in ENDING]
    return len(asked) > 1 or any(number not in job.requests for number in asked)


def _call_where_safe(job: Job, act: Callable[[], None]) -> None:
    """Call `act()` on this thread if the main thread is communicating, else on the main thread.

    After a timeout, this thread calls `act()` in any case. If the process must end, the calls are
    repeated until it ends.
    """
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
    """Return True if the main thread is communicating, so that it cannot be in a BLAS call."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    # torch.fx compiles functions in namespaces without __name__.
    module = frame.f_globals.get("__name__") or ""
    return module.startswith(("hpc3d.comm.", "hpc3d.runtime."))


def leave(job: Job, number: int = signal.SIGTERM) -> None:
    """Terminate this process because of a signal, unless its termination has already begun."""
    if job.ending.acquire(blocking=False):
        os.setpriority(os.PRIO_PROCESS, os.getpid(), 19)  # the main thread may be busy-waiting
        _report_end(job, number)
        save_in_child(job)
        time.sleep(1)
        os._exit(128 + number)


def _report_end(job: Job, number: int) -> None:
    if job.size == 1:
        with suppress(RuntimeError):  # the signal interrupted a print
            job.complain(ended_by(number))


def _keep(job: Job) -> None:
    """Call the exit hooks immediately in a child process, because this process may be killed."""
    if job.exit_hooks and job.ending.acquire(blocking=False):
        try:
            child = save_in_child(job)
            while not os.waitpid(child, os.WNOHANG)[0]:
                if _must_end(job, job.signals):  # the child completes the exit hooks
                    _report_end(job, job.signals[-1])
                    os._exit(128 + job.signals[-1])
                time.sleep(0.01)
        finally:
            job.ending.release()


def save_in_child(job: Job) -> int:
    """Call the exit hooks in a child process with its own session; return the child's process ID.

    Open MPI's launcher kills all processes of a job 0.25 s after SIGTERM, or as soon as one of
    them has ended.  The child process is not killed and completes the exit hooks.
    """
    child = fork_or_end()
    if child == 0:
        os.setsid()
        signal.alarm(_SAVED)  # ends the child if it deadlocks on a lock that another thread held
        _call_all(job)
        os._exit(0)
    return child


def finish(job: Job) -> None:
    """Call the exit hooks of the job that have not been called yet."""
    with job.ending:
        _call_all(job)


def _call_all(job: Job) -> None:
    while job.exit_hooks:
        try:
            job.exit_hooks.pop(0)()
        except Exception as error:
            if job.first_to_fail():
                job.complain(f"rank {job.rank}: cleanup failed: {'; '.join(lines_of(error))}")


def watch(seconds: float) -> None:
    """Start or restart the watchdog, which prints all stack traces and exits after `seconds`."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def unwatch() -> None:
    faulthandler.cancel_dump_traceback_later()
