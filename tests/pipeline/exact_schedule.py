"""Optimal makespan of a small pipeline workload, by mixed-integer linear programming (HiGHS).

The variables are the start time of each pass, the makespan, and a binary variable for each pair of
passes of a stage whose order is free.  Microbatches are identical, so passes of the same kind run
in the order of their microbatches.
"""

from collections import defaultdict
from itertools import combinations, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp


class _Program:
    def __init__(self, work, horizon):
        self.work, self.horizon, self.rows = work, horizon, []
        passes = [*product(range(len(work.costs)), "FBW", range(work.micros))]
        self.start = {each: number for number, each in enumerate(passes)}
        self.end = len(passes)
        self.count = self.end + 1

    def seconds(self, done):
        return self.work.costs[done[0]].seconds()[done[1]]

    def at_least(self, coefficients, value):
        """Add a constraint: the sum of coefficients times variables is at least `value`."""
        self.rows.append((coefficients, value))

    def after(self, before, later, comm=0.0):
        delay = self.seconds(before) + comm
        self.at_least({self.start[later]: 1, self.start[before]: -1}, delay)

    def precedences(self):
        for (stage, op, mb), number in self.start.items():
            comm = self.work.costs[stage].comm
            if op == "W":
                self.at_least({self.end: 1, number: -1}, self.seconds((stage, op, mb)))
            else:
                self.after((stage, op, mb), (stage, {"F": "B", "B": "W"}[op], mb))
            if mb:
                self.after((stage, op, mb - 1), (stage, op, mb))
            if stage < len(self.work.costs) - 1 and op != "W":
                pair = (stage, op, mb), (stage + 1, op, mb)
                self.after(*(pair if op == "F" else reversed(pair)), comm)

    def order(self, stage):
        """Return an affine expression (coefficients, constant) for each pair of passes of a stage,
        which is 1 if the first pass precedes the second one, and 0 otherwise."""
        found = {}
        for one, two in combinations([each for each in self.start if each[0] == stage], 2):
            fixed = "FBW".index(one[1]) <= "FBW".index(two[1]) and one[2] <= two[2]
            if fixed:
                found[one, two], found[two, one] = ({}, 1), ({}, 0)
                continue
            binary, self.count = self.count, self.count + 1
            found[one, two], found[two, one] = ({binary: 1}, 0), ({binary: -1}, 1)
            for first, second, sign in ((one, two, 1), (two, one, -1)):
                late = {self.start[second]: 1, self.start[first]: -1, binary: -sign * self.horizon}
                least = self.seconds(first) - self.horizon * (1 if sign > 0 else 0)
                self.at_least(late, least)
        return found

    def limit_memory(self, stage):
        saved, inputs, limit = self.work.memory[stage]
        sizes, order = {"F": saved, "B": inputs - saved, "W": -inputs}, self.order(stage)
        for last in (each for each in self.start if each[0] == stage):
            total, constant = defaultdict(float), sizes[last[1]]
            for other in (each for each in self.start if each[0] == stage and each != last):
                coefficients, value = order[other, last]
                constant += value * sizes[other[1]]
                for variable, factor in coefficients.items():
                    total[variable] -= factor * sizes[other[1]]
            if np.isfinite(limit) and total:
                self.at_least(dict(total), constant - limit - 1e-6)


def optimum(work, horizon):
    """Return the optimal makespan of a workload, which must not exceed `horizon`."""
    program = _Program(work, horizon)
    program.precedences()
    for stage in range(len(work.costs)):
        program.limit_memory(stage)
    matrix = np.zeros((len(program.rows), program.count))
    for row, (coefficients, _) in enumerate(program.rows):
        matrix[row, [*coefficients]] = [*coefficients.values()]
    binary = np.arange(program.count) > program.end
    solved = milp(
        np.arange(program.count) == program.end,
        constraints=LinearConstraint(matrix, [value for _, value in program.rows]),
        integrality=binary,
        bounds=Bounds(0, np.where(binary, 1, horizon)),
    )
    assert solved.status == 0, solved.message
    return solved.fun
