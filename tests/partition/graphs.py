"""Graphs for tests, and results of exhaustive search."""

import random
from itertools import pairwise

from hpc3d.partition.atom_graph import Atom, Graph, Value, contracted
from hpc3d.partition.evaluation import Limits, held, load
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.step_model import in_flight
from hpc3d.pipeline.timeline import Cost, makespan, timeline

LOADS = (8, 11, 2, 1, 18, 5, 4, 11)


def chain(loads=LOADS, nbytes=0.0):
    """Return a chain of atoms whose backward pass takes twice as long as forward."""
    atoms = [Atom((number,), each, 2 * each) for number, each in enumerate(loads)]
    return Graph(atoms, [Value(number, (number + 1,), nbytes) for number in range(len(loads) - 1)])


def random_graph(seed, most=9, dense=0.45):
    """Return up to `most` atoms with integer costs; values have one or several readers."""
    draw = random.Random(seed)
    count = draw.randint(3, most)
    atoms = [
        Atom((f"n{number}",), *(draw.randint(low, 9) for low in (1, 1, 1, 0)))
        for number in range(count)
    ]
    values = []
    for source in range(count):
        targets = [target for target in range(source + 1, count) if draw.random() < dense]
        if len(targets) > 1 and draw.random() < 0.3:
            values.append(Value(source, (targets.pop(),), draw.randint(1, 5)))
        if targets:
            values.append(Value(source, tuple(targets), draw.randint(1, 5)))
    return contracted(atoms, values)


def random_limits(seed, stages):
    draw = random.Random(seed)
    memory, rate = draw.choice([None, 70, 40]), draw.choice([None, 1.0, 3.0])
    return Limits(stages, memory, rate, draw.randint(1, 8))


def partitions(graph, stages):
    """Return all partitions into stages: lists of downsets, which contain their inputs."""
    everything = graph.everything

    def closed(members):
        return all(
            not graph.inputs[atom] & ~members for atom in range(len(graph)) if members >> atom & 1
        )

    downsets = [members for members in range(1, everything + 1) if closed(members)]

    def extended(chain, left):
        if left == 0:
            if chain[-1] == everything:
                yield chain[1:]
            return
        for members in downsets:
            if members != chain[-1] and not chain[-1] & ~members:
                yield from extended([*chain, members], left - 1)

    return extended([0], stages)


def stages_of(downsets):
    return [after & ~before for before, after in pairwise([0, *downsets])]


def fits(graph, stages, limits, flights):
    return limits.memory is None or all(
        held(graph, members, flight) <= limits.memory
        for members, flight in zip(stages, flights, strict=True)
    )


def lightest_of_all(graph, limits):
    """Return the smallest maximum load of all partitions, or None."""
    found = []
    for count in range(1, min(limits.ranks, len(graph)) + 1):
        flights = [min(limits.microbatches, count - stage) for stage in range(count)]
        for downsets in partitions(graph, count):
            stages = stages_of(downsets)
            if fits(graph, stages, limits, flights):
                found.append(max(load(graph, members, limits) for members in stages))
    return min(found, default=None)


def seconds(graph, downsets, limits, schedule):
    """Return the step time of a partition, with boundary bytes counted value by value."""
    costs = []
    for downset, members in zip(downsets, stages_of(downsets), strict=True):
        crossing = sum(
            value.nbytes
            for value in graph.values
            if downset >> value.source & 1
            and any(not downset >> target & 1 for target in value.targets)
        )
        times = graph.total("forward", members), graph.total("backward", members)
        costs.append(Cost(*times, 0.0, limits.seconds(crossing)))
    name = schedule if downsets[1:] else "none"
    return makespan(timeline(*instruction_streams(name, len(costs), limits.microbatches), costs))


def quickest_of_all(graph, limits, schedule):
    """Return the shortest step of all partitions, or None."""
    found = []
    for count in range(1, min(limits.ranks, len(graph)) + 1):
        name = schedule if count > 1 else "none"
        passes, _ = instruction_streams(name, count, limits.microbatches)
        flights = [in_flight(stream).activations for stream in passes]
        for downsets in partitions(graph, count):
            if fits(graph, stages_of(downsets), limits, flights):
                found.append(seconds(graph, downsets, limits, schedule))
    return min(found, default=None)
