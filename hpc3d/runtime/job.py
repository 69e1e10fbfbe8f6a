"""The MPI job as a whole: what ranks settle before there is a mesh, and how they end together."""

from __future__ import annotations

import errno
import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

from mpi4py import MPI

from hpc3d.plain import lines_of, plain
from hpc3d.runtime.exit_codes import BAD_INPUT, REFUSED, JobExit
from hpc3d.runtime.host_map import kernel, namesakes
from hpc3d.runtime.launcher import end_later, launcher

_OUTLIVED = 2  # seconds by which it is known that a rank failed after it has gone
_UNHEARD = 5  # seconds that a launcher takes to end a job, if it hears that it should


class Job:
    """All ranks.  `exit_hooks` are the functions to call before the job ends, successfully or not.
    `started` is the time at which this rank started,
    and `signals` records the signals that came.  At the first one in `requests` the job stops by
    itself."""

    def __init__(self, name: str, started: float) -> None:
        if not MPI.Is_initialized():  # it was only looked at, by `mpi_library.found`
            MPI.Init_thread()
        self.name, self.comm = name, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size
        self.exit_hooks, self.ending = [], threading.Lock()
        self.signals, self.requests, self.started = [], set(), started
        self.kernels = self.gather((socket.gethostname(), kernel()))
        self.id = self.comm.bcast(f"{self.kernels[0][0]}-{os.getpid()}")

    def namesakes(self) -> str | None:
        """What is wrong where two hosts have one name: Open MPI takes them for one, and waits in
        its next call for ever."""
        return namesakes(self.kernels) if "Open MPI" in self.library() else None

    def from_root(self, function: Callable[[], Any]) -> Any:
        """The value of `function()`, called on rank 0 alone; what of REFUSED it raises is
        refused on all ranks."""
        return self.comm.bcast(self.on_root(function))

    def on_root(self, function: Callable[[], Any]) -> Any:
        """The same, for rank 0 alone: None on the others."""
        value, problems = None, ()
        if self.rank == 0:
            try:
                with self.patience():
                    value = function()
            except REFUSED as error:
                problems = lines_of(error)
        if problems := self.comm.bcast(problems):
            self.refuse(*problems)
        return value

    def patience(self, doing: str = "") -> AbstractContextManager[None]:
        """Rank 0 says what goes on if the block takes long: `doing`, or the newest record."""
        if self.rank:
            return nullcontext()
        from hpc3d.patience import patience

        return patience(self.name, doing, since=self.started)

    def on_all_ranks(self, function: Callable[[], Any]) -> Any:
        """The value of `function()` on every rank; what of REFUSED it raises on any is refused on
        all, each line once."""
        value, problems = None, []
        try:
            value = function()
        except REFUSED as error:
            problems = lines_of(error)
        if found := dict.fromkeys(line for lines in self.gather(problems) for line in lines):
            self.refuse(*found)
        return value

    def refuse(self, *problems: str) -> NoReturn:
        """End the job on all ranks with a line of rank 0 for each problem."""
        if self.rank == 0:
            for problem in problems:
                self.complain(plain(problem))
        raise JobExit(BAD_INPUT)

    def complain(self, text: str) -> None:
        print(f"hpc3d.{self.name}: {text}", file=sys.stderr, flush=True)

    def scatter_from_root(self, function: Callable[[], Sequence[Any]]) -> Any:
        """This rank's value of the list, one a rank, that `function()` makes on rank 0."""
        return self.comm.scatter(function() if self.rank == 0 else None)

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        return self.comm.allgather(value)

    def barrier(self) -> None:
        """Wait for all ranks, asleep: rank 0 may have work that takes seconds."""
        request = self.comm.Ibarrier()
        while not request.Test():
            time.sleep(0.005)

    def place(self) -> dict[str, Any]:
        """This rank's host, process, number on its node and the first rank of that; collective."""
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        mine = node.bcast(self.rank), MPI.Get_processor_name(), kernel()
        first = self.gather(mine).index(mine)
        own = {"host": socket.gethostname(), "pid": os.getpid()}
        return own | {"local_rank": node.rank, "node": first}

    def library(self) -> str:
        """The MPI library, in one line."""
        line = MPI.Get_library_version().split(",")[0].split("\n")[0]
        return " ".join(line.split())

    def first_to_fail(self) -> bool:
        """Whether nothing of this job has said yet on this host that it failed.

        The first to bind an abstract address has it until its process has ended, and a child that
        outlives it for a while, in which others end; no file is left.
        """
        try:
            failure = socket.socket(socket.AF_UNIX)
            failure.bind(f"\0hpc3d-{self.id}-failed")
        except OSError as error:
            return error.errno != errno.EADDRINUSE
        self.failure = failure
        _linger(failure.fileno())
        return True

    def abort(self, code: int) -> None:
        end_job(code)


def end_job(code: int) -> None:
    """End all ranks now; at least this one, if the launcher does not listen.  Exit handlers do not
    run.  Needs no `Job`."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    if MPI.COMM_WORLD.size == 1:  # there is nobody that MPI would have to end
        os._exit(code)
    end_later(launcher())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Not a thread of Python's, for MPI waits for the launcher without letting others run.
    faulthandler.dump_traceback_later(_UNHEARD, exit=True, file=nowhere)
    MPI.COMM_WORLD.Abort(code)


def _linger(descriptor: int) -> None:
    """Leave a process that has but this file open, for a while.  It is a program of its own, for
    which no copy of this process is made, whatever its other threads do."""
    import subprocess

    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = ["sleep", str(_OUTLIVED)]
    with suppress(OSError):
        subprocess.Popen(command, pass_fds=[descriptor], start_new_session=True, **quiet)
