"""Worker threads of a process, which compute the blocks of array operations.

NumPy releases the global interpreter lock in ufuncs and matrix products, so several threads
can compute blocks at the same time. A single thread computes each block. If partial sums of blocks
are added, the blocks must not depend on the number of threads. Results are then bitwise identical
for any number of threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import numpy._core._multiarray_umath as numpy_core

_Block = TypeVar("_Block")
# OpenBLAS functions in NumPy's wheels, and in other builds with 64-bit and 32-bit integers.
_NAMES = "scipy_openblas_{}64_", "openblas_{}64_", "openblas_{}"
_PTHREADS = 1  # result of OpenBLAS's `get_parallel` if it does not use OpenMP


def parallel_for(function: Callable[[_Block], object], blocks: Sequence[_Block]) -> None:
    """Call `function(block)` for each block, using all threads of this process.

    Matrix products inside `function` use one BLAS thread each. If the worker threads are busy, as
    in a nested call, the calling thread computes all blocks. An exception in `function` is raised
    after all threads have stopped.
    """
    team = _team()
    if team is None or not team.free.acquire(blocking=False):
        for block in blocks:
            function(block)
        return
    try:
        team.run(function, blocks)
    finally:
        team.free.release()


def thread_count() -> int:
    """Return the number of threads that compute blocks, including the calling thread."""
    team = _team()
    return 1 if team is None else team.threads


def shares(count: int, threads: int | None = None, edge: int = 1) -> list[slice]:
    """Split `count` elements into one slice per thread; the bounds are multiples of `edge`."""
    return slices(count, edge * max(1, -(-count // (edge * (threads or thread_count())))))


def slices(count: int, step: int) -> list[slice]:
    """Split `count` elements into slices of `step` elements; the last slice may be shorter."""
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


@cache
def blas_kernels() -> str:
    """Return the name of the processor for which OpenBLAS has chosen its kernels, or ""."""
    library = ctypes.PyDLL(numpy_core.__file__)
    for name in _NAMES:
        with suppress(AttributeError):
            function = getattr(library, name.format("get_corename"))
            function.restype = ctypes.c_char_p
            return function().decode()
    return ""


@cache
def _team() -> _Team | None:
    """Start the worker threads, or return `None` if this process has a single thread.

    The process has as many threads as NumPy's OpenBLAS. The result is also `None` if NumPy uses
    another BLAS library, because hpc3d cannot limit the BLAS calls within a block to one thread.
    """
    library = ctypes.PyDLL(numpy_core.__file__)
    for name in _NAMES:
        with suppress(AttributeError):
            parallel, threads, set_threads = (
                getattr(library, name.format(verb))
                for verb in ("get_parallel", "get_num_threads", "set_num_threads")
            )
            several = parallel() == _PTHREADS and threads() > 1
            return _Team(threads(), set_threads) if several else None
    return None


class _Team:
    """Worker threads, which compute blocks together with the calling thread.

    `free` is locked during a call to `run`. `set_blas_threads(n)` sets the number of threads of
    matrix products.
    """

    def __init__(self, threads: int, set_blas_threads: Callable[[int], Any]) -> None:
        from queue import SimpleQueue  # not needed by a process with a single thread

        self.threads, self.set_blas_threads = threads, set_blas_threads
        self.free, self.queue = threading.Lock(), SimpleQueue
        self.calls: SimpleQueue = SimpleQueue()
        for _ in range(threads - 1):
            threading.Thread(target=self._work, daemon=True).start()
        os.register_at_fork(after_in_child=_team.cache_clear)  # a child process has no workers

    def run(self, function: Callable[[_Block], object], blocks: Sequence[_Block]) -> None:
        """Call `function(block)` for each block. Raise the first exception at the end."""
        workers = min(self.threads, len(blocks)) - 1
        remaining, ended = iter(blocks), self.queue()
        self.set_blas_threads(1)
        try:
            for _ in range(workers):
                self.calls.put((function, remaining, ended))
            errors = [_computed(function, remaining)]
            errors += [ended.get() for _ in range(workers)]
        finally:
            self.set_blas_threads(self.threads)
        for error in filter(None, errors):
            raise error

    def _work(self) -> None:
        while True:
            function, remaining, ended = self.calls.get()
            error = _computed(function, remaining)
            del function, remaining  # the caller may free the arrays as soon as it returns
            ended.put(error)
            del ended, error


def _computed(
    function: Callable[[_Block], object], remaining: Iterator[_Block]
) -> BaseException | None:
    """Compute blocks until none remain; return the exception of a failed block."""
    try:
        for block in remaining:
            function(block)
    except BaseException as error:
        for _ in remaining:  # the other threads start no further block
            pass
        return error
    return None
