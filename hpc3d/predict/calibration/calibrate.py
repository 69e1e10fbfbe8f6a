"""Fit a machine model to traces of runs on the machine.

The functions in align_trace.py find the operations that a rank executes between two trace events,
and their total time. The times of matrix products and communication calls are averaged in bins of
similar size, with one bin per power of two.
The bandwidth of each kernel and the common launch time are obtained by a least-squares fit to the
measured times, so they include the Python overhead between kernels.

All times are CPU times of the ranks. The wall-clock time of a step is longer, because ranks that
wait for a communication call need some time to wake up at its end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import log2
from statistics import median
from typing import Any

import numpy as np

from hpc3d.config.input_file import Config
from hpc3d.predict.calibration.align_trace import Product, TimedKernel, TimedWork
from hpc3d.predict.machine.machine import CallTable, Link, Machine, Rates
from hpc3d.predict.simulation.simulator import StageRun, simulate, step_length

_LEAST_S = 1e-7  # minimum duration of a call in seconds
_PROBE_S = 1e-4  # trial value of the wake-up time in seconds (see `with_wakeup`)
# Longest plausible wake-up time in seconds: a sleep in hpc3d.comm.mpi plus the timer slack.
MOST_S = 3e-4


def machine_of(works: Sequence[TimedWork], **facts: Any) -> Machine:
    """Fit a Machine to the measured `works` of ranks on one node.

    `facts` contains the other fields of the Machine: name, source, ranks_per_node, cores and
    memory_gb.
    """
    rates = _rates_of(works)
    launch, kernels, bandwidth = _kernels_of(works, rates)
    tables = _tables_of(works, bandwidth)
    pairs = [table.seconds[0] for table in tables if table.members == 2]
    return Machine(
        memory_bandwidth=bandwidth,
        launch_s=launch,
        gemm=rates,
        links=(Link(0, _rounded(median(pairs)) if pairs else launch, bandwidth),),
        kernels=kernels,
        measured=tables,
        **facts,
    )


def _rates_of(works: Sequence[TimedWork]) -> dict[str, Rates]:
    """Return a dict that maps each dtype to its Rates.

    The rates are computed from the items of `works` that consist of a single matrix product.
    """
    found = defaultdict(list)
    for work in works:
        if work.call is None and len(work.computed) == 1 and isinstance(work.computed[0], Product):
            found[work.computed[0].dtype].append((work.computed[0].flop, work.seconds))
    rates = {}
    for dtype, points in found.items():
        flop, seconds = _octave_means(points)
        rate = tuple(_rounded(x / y) for x, y in zip(flop, seconds, strict=True))
        rates[dtype] = Rates(max(rate), flop, rate)
    return rates


def _octave_means(
    points: Sequence[tuple[float, float]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Average the (x, y) points in each octave of x, which spans 2^(i - 1/2) to 2^(i + 1/2).

    Returns two tuples: the mean x of each octave, and the mean y.
    """
    octaves = defaultdict(list)
    for x, y in points:
        octaves[round(log2(x))].append((x, y))
    means = [np.mean(octaves[number], axis=0).tolist() for number in sorted(octaves)]
    return tuple(tuple(map(_rounded, column)) for column in zip(*means, strict=True))


def _rounded(value: float) -> float:
    """Round to four significant digits, the precision of the measurements."""
    return float(f"{value:.4g}")


def _kernels_of(
    works: Sequence[TimedWork], rates: Mapping[str, Rates]
) -> tuple[float, dict[str, float], float]:
    """Fit the launch time and the bandwidth of kernels.

    Returns the launch time in seconds, a dict from kernel to its bandwidth in bytes/s, and the
    mean bandwidth of all kernels in bytes/s. The values are the weighted least-squares solution of
    one equation per TimedWork without a communication call:

    seconds - products = sum over kernels of launch + bytes / rate

    Equations are weighted by 1 / sqrt(seconds), because the variance of a sum of many kernel times
    is proportional to their number.
    """
    rows = [work for work in works if work.call is None and _kernels_in(work)]
    names = sorted({each.name for work in rows for each in _kernels_in(work)})
    column = {name: number for number, name in enumerate(names, 1)}
    counted, spent = np.zeros((len(rows), 1 + len(names))), np.empty(len(rows))
    for row, work in enumerate(rows):
        spent[row] = work.seconds - _in_products(work, rates)
        for each in _kernels_in(work):
            counted[row, [0, column[each.name]]] += 1, each.bytes
    weight = np.array([work.seconds for work in rows]) ** -0.5
    launch, *per_byte = _positive(counted * weight[:, None], spent * weight)
    rate = {name: _rounded(1 / each) for name, each in zip(names, per_byte, strict=True) if each}
    total = counted[:, 1:].sum(0)
    return _rounded(launch), rate, _rounded(total.sum() / (total @ per_byte))


def _kernels_in(work: TimedWork) -> list[TimedKernel]:
    return [each for each in work.computed if isinstance(each, TimedKernel)]


def _in_products(work: TimedWork, rates: Mapping[str, Rates]) -> float:
    """Return the total time in seconds of the matrix products in `work`, given their `rates`."""
    products = [each for each in work.computed if isinstance(each, Product)]
    return sum(each.flop / rates[each.dtype].curve(each.flop) for each in products)


def _positive(matrix: np.ndarray, values: np.ndarray) -> list[float]:
    """Solve a least-squares problem with nonnegative coefficients.

    The solver repeatedly sets negative coefficients to 0 and solves for the others, until no
    coefficient is negative.
    """
    found, used = np.zeros(matrix.shape[1]), np.arange(matrix.shape[1])
    while True:
        part = np.linalg.lstsq(matrix[:, used], values, rcond=None)[0]
        if (part >= 0).all():
            found[used] = part
            return found.tolist()
        used = used[part > 0]


def _tables_of(works: Sequence[TimedWork], bandwidth: float) -> tuple[CallTable, ...]:
    """Return one CallTable per operation and group size.

    A table contains the mean time for each octave of message sizes.
    """
    found = defaultdict(list)
    for work in works:
        if work.call and work.call.bytes:
            point = work.call.bytes, max(_LEAST_S, work.seconds)
            found[work.call.op, work.call.members].append(point)
    return tuple(
        CallTable(op, members, 0, "at once", *_table(_octave_means(points), bandwidth))
        for (op, members), points in sorted(found.items())
    )


def _table(found: tuple, bandwidth: float) -> tuple:
    """Return the columns `bytes` and `seconds` of a call table, extended to at least two points.

    If the table has only one point, a second point, at twice the size, is extrapolated from the
    memory bandwidth.
    """
    (bytes_, *more), (seconds, *_) = found
    if more:
        return found
    return (bytes_, 2 * bytes_), (seconds, _rounded(seconds + bytes_ / bandwidth))


def with_wakeup(machine: Machine, timed: Iterable[tuple[Config, float]]) -> Machine:
    """Return `machine` with a wake-up time fitted to the measured step times.

    `timed` contains a pair (config, step time in seconds) for each run. Each rank of these runs
    must have had a dedicated core. `wakeup_s` is the median over the runs, limited to MOST_S
    because longer delays are caused by other programs.
    """
    found = []
    for config, seconds in timed:
        none, some = (
            step_seconds(
                simulate(config, config.model.vocabulary, replace(machine, wakeup_s=each))
            )
            for each in (0.0, _PROBE_S)
        )
        found.append((seconds - none) / (some - none) * _PROBE_S)
    return replace(machine, wakeup_s=_rounded(min(MOST_S, max(0.0, median(found or [0.0])))))


def step_seconds(runs: Sequence[StageRun]) -> float:
    """Return the time in seconds from the first start to the last end of a simulated step."""
    return step_length(runs) * 1e-9
