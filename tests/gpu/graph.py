"""Steps replayed from a CUDA graph, compared with launched steps; the time of a launch."""

import time
from functools import partial

import numpy as np

from tests.gpu.steps import SMALL, TINY, learnt
from tests.gpu.trainers import BIAS, MIXTRAL, SWITCH, trainer_of, values_of

WAYS = {
    "": {},
    " with dropout": {"dropout": 0.1},
    " in 2 microbatches": {"microbatches": 2},
    " with a mixture, top 2": {**MIXTRAL, "capacity": 2.0},
    " with a mixture, top 1, in 2 microbatches": {**SWITCH, "microbatches": 2},
    " with a mixture, top 1, and a bias": {**SWITCH, **BIAS},
    " in 4 microbatches, in chunks": {"microbatches": 4, "attention": "chunked"},
}
# Sequences of cuDNN's graphs are a multiple of 128.
WHOLE = {**SMALL, "hidden": 256, "sequence": 128}
STEPS = 8
KERNELS = 2000


def cases(device, quick):
    sizes = {**WHOLE, **TINY} if device.fake else WHOLE
    for real in device.reals[: 1 if device.fake else None]:  # 16 bits want whole sequences
        for words, how in list(WAYS.items())[:: 5 if quick else 1]:
            if real != "float32" and how.keys() & BIAS:
                continue
            run = partial(as_without, device, {**sizes, **how, "dtype": real})
            yield f"{STEPS} steps{words} [{real}]", run
    yield "time of a launch", partial(launches, device)


def as_without(device, how, notes):
    runs = {}
    for wanted in (False, True):
        trainer = trainer_of(device, steps=STEPS, **how, cuda_graph=wanted)
        steps, seconds = [], []
        for number in range(STEPS):
            start = time.perf_counter()
            step = trainer.step(number)
            seconds.append(time.perf_counter() - start)
            steps.append((step.loss, step.grad_norm))
        runs[wanted] = np.array(steps), values_of(trainer)
        notes.fact(f"seconds of steps, graph {wanted}", [round(each, 5) for each in seconds])
    notes.same("losses and norms", runs[True][0], runs[False][0], 1e-5)
    replayed, plain = runs[True][1], runs[False][1]
    equal = all(np.array_equal(replayed[name], plain[name]) for name in plain)
    notes.fact("weights equal to the last bit", equal)
    for name, value in learnt(plain).items():
        notes.near(name, replayed[name], value, 1e-4)


def launches(device, notes):
    """Report the time of kernels on a single element, one after another."""
    for name, seconds in launch_seconds(device.pool()).items():
        notes.fact(f"us a kernel, {name}", 1e6 * seconds)


def launch_seconds(pool, count=KERNELS):
    """Return the time of such a kernel, launched by the host and in a graph."""
    graph, array = pool.graph(), pool.empty((1,), np.float32)

    def kernels():
        for _ in range(count):
            array[...] = 1

    kernels()
    graph.begin()
    kernels()
    graph.end()
    ways = {"launched": kernels, "in a graph": graph.launch}
    return {name: min(timed(pool, work) for _ in range(5)) / count for name, work in ways.items()}


def timed(pool, work):
    pool.synchronize()
    start = time.perf_counter()
    work()
    pool.synchronize()
    return time.perf_counter() - start
