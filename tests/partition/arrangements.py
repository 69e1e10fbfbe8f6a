"""Models of a few atoms with all their arrangements, as a reference for the search."""

import random
from itertools import combinations, product

from hpc3d.partition.atom_graph import Atom, Graph, Shared, Value
from hpc3d.partition.evaluation import (
    ModelCosts,
    PipelineChoice,
    StageChoice,
    bytes_held,
    evaluated,
)
from hpc3d.predict.machine.machine import Link, Machine, Rates

# A message of n bytes takes 1 + n / 10 seconds on a node of two ranks, 2 + n between nodes.
MACHINE = Machine(
    "two by two",
    "for tests",
    ranks_per_node=2,
    cores=0,
    memory_gb=1.0,
    memory_bandwidth=1.0,
    launch_s=0.0,
    gemm={"float32": Rates(1.0, (1.0,), (1.0,))},
    links=(Link(2, 1.0, 10.0), Link(0, 2.0, 1.0)),
)


def line(seconds, nbytes, batch=8):
    """Return a chain of atoms with seconds per row, and bytes between them."""

    def graph(rows):
        atoms = [Atom((n,), each * rows, 2 * each * rows) for n, each in enumerate(seconds)]
        values = [Value(n, (n + 1,), each * rows) for n, each in enumerate(nbytes)]
        return Graph(atoms, values)

    return ModelCosts(graph, MACHINE, batch)


def random_costs(seed, most=5):
    """Return random costs of a chain of 3 to `most` atoms, whose ends may share a weight, a memory
    size in bytes that may be tight, and 2 to 4 ranks."""
    draw = random.Random(seed)
    count = draw.randint(3, most)
    numbers = [[draw.randint(1, 9) for _ in range(6)] for _ in range(count)]
    shared = [Shared((0, count - 1), 4.0, 1.0)] if draw.random() < 0.4 else []
    smaller, batch = draw.choice([1, 4, 1e9]), draw.choice([4, 6, 8])

    def graph(rows):
        atoms = [
            Atom((n,), a * rows, b * rows, 4.0 * c, d * rows, float(c), working=float(e))
            for n, (a, b, c, d, _, e) in enumerate(numbers)
        ]
        values = [
            Value(n, (n + 1,), numbers[n][3] * rows / smaller) for n in range(len(numbers) - 1)
        ]
        return Graph(atoms, values, shared)

    memory = draw.choice([1e9, 150.0, 100.0, 60.0])
    return ModelCosts(graph, MACHINE, batch), memory, draw.randint(2, 4)


def arrangements(costs, ranks, micros):
    """Yield all arrangements under three schedules, with two chunks for an interleaved one."""
    for (name, chunks), width in product(
        (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)), range(1, ranks + 1)
    ):
        every = range(1, ranks + 1)
        for replicas in product(every, repeat=width):
            counts = [m for m in micros if max(replicas) <= costs.rows(m, 1)]
            if sum(replicas) > ranks or (chunks > 1 and width == 1):
                continue
            for stages in _cuts(costs.count, replicas * chunks):
                for count in counts:
                    if chunks == 1 or width <= count:
                        yield PipelineChoice(stages, count, name, chunks)


def _cuts(count, replicas):
    for cut in combinations(range(1, count), len(replicas) - 1):
        for again in product((False, True), repeat=len(replicas)):
            yield tuple(map(StageChoice, (*cut, count), replicas, again))


def quickest_arrangement(costs, memory, ranks, micros):
    """Return the seconds of the shortest step, or None."""
    return min(
        (
            evaluated(costs, choice).seconds
            for choice in arrangements(costs, ranks, micros)
            if max(bytes_held(costs, choice)) <= memory
        ),
        default=None,
    )
