"""Worker threads that compute the blocks of an operation."""

import os
import subprocess
import sys
import threading
from itertools import count

import numpy as np
import pytest

from hpc3d.arrays import worker_threads
from hpc3d.arrays.worker_threads import parallel_for, thread_count
from hpc3d.benchmarks import harness
from hpc3d.config import package_data
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve


@pytest.fixture
def blas(monkeypatch):
    """Create a team of three threads; return the list of BLAS thread counts that it sets."""
    found = []
    team = worker_threads._Team(3, found.append)
    monkeypatch.setattr(worker_threads, "_team", lambda: team)
    return found


@pytest.mark.parametrize("blocks", [0, 1, 2, 50])
def test_each_block_is_computed_once(blas, blocks):
    done = []
    parallel_for(done.append, range(blocks))
    assert sorted(done) == [*range(blocks)]
    assert thread_count() == 3 and blas == [1, 3]


def test_all_threads_compute_blocks(blas):
    together = threading.Barrier(3, timeout=30)
    parallel_for(lambda block: together.wait(), range(3))


def test_nested_call_is_computed_by_its_own_thread(blas):
    found = []

    def outer(block):
        parallel_for(lambda inner: found.append((threading.get_ident(), block, inner)), "ab")

    parallel_for(outer, range(20))
    assert sorted((block, inner) for _, block, inner in found) == [
        (block, inner) for block in range(20) for inner in "ab"
    ]
    assert all(len({who for who, at, _ in found if at == block}) == 1 for block in range(20))
    assert blas == [1, 3]


def test_exception_of_a_block_is_raised_and_the_threads_continue(blas):
    numbers = count()

    def fail(block):
        if next(numbers) == 5:
            raise KeyError(block)

    with pytest.raises(KeyError):
        parallel_for(fail, range(1000))
    assert next(numbers) < 1000
    test_all_threads_compute_blocks(blas)


def test_workers_keep_no_array_of_a_finished_call(blas):
    array = np.zeros(3)
    before = sys.getrefcount(array)
    for _ in range(20):
        parallel_for(lambda block, array=array: array.sum(), range(5))
        assert sys.getrefcount(array) == before


_STARTED = """
import os, sys, threading
from hpc3d.arrays.worker_threads import parallel_for, thread_count
parallel_for(int, range(9))
print(thread_count(), threading.active_count(), "queue" in sys.modules, flush=True)
child = os.fork()
parallel_for(int, range(9))
if child:
    print(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_process_has_as_many_threads_as_blas(threads):
    """Check this also after a fork. A single-threaded process starts and imports nothing."""
    threads = min(threads, len(os.sched_getaffinity(0)))  # as OpenBLAS does
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": ""}
    how = {"capture_output": True, "text": True, "timeout": 30}
    done = subprocess.run([sys.executable, "-c", _STARTED], check=True, env=environment, **how)
    assert done.stdout.split() == [str(threads), str(threads), str(threads > 1), "0"]


def trained(*words):
    """Train for two steps; return the losses, the gradient norms and the parameters."""
    sizes = {"hidden": 128, "layers": 1, "heads": 2, "sequence": 128}
    words = [*(f"--model.{key}={size}" for key, size in sizes.items()), "--train.batch=4", *words]
    config = resolve(load(package_data.shipped("gpt-serial.toml"), words), 1)
    trainer = harness.serial_trainer(config)
    steps = [trainer.step(number) for number in range(2)]
    return [(step.loss, step.grad_norm) for step in steps], trainer.parameters.value


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--model.dropout=0.1"], id="GPT-2"),
        pytest.param(["--model.kind=llama"], id="Llama", marks=pytest.mark.slow),
        pytest.param(["--train.dtype=bfloat16"], id="16 bits", marks=pytest.mark.slow),
    ],
)
def test_training_does_not_depend_on_the_number_of_threads(words, blas, monkeypatch):
    totals, parameters = trained(*words)
    assert len(blas) > 100
    monkeypatch.setattr(worker_threads, "_team", lambda: None)
    again, expected = trained(*words)
    assert totals == again
    np.testing.assert_array_equal(parameters, expected)
