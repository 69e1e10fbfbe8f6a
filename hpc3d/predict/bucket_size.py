"""Default size of gradient buckets, computed from the machine model.

The latency of a bucket's reduction increases with the number of replicas. The default size is
large enough that this latency is a small part of the reduction time, and small enough that each
stage has several buckets, whose reductions can overlap with the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hpc3d.arrays.narrow import itemsize
from hpc3d.comm.communicator import received_share
from hpc3d.comm.mesh import COPIES, data_axes, groups_of, plane
from hpc3d.config.input_file import BUCKET_MB
from hpc3d.config.package_data import MACHINE, MEASURED, default_machine, find
from hpc3d.model.families import block_weights, expert_parameters

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config
    from hpc3d.predict.machine.machine import Machine

_LATENCY = 0.4  # maximum fraction of a collective's time that is latency
_FEWEST = 4  # minimum number of buckets per stage
_LONG = 1e12  # size in bytes of an array whose collective has a negligible latency


def bucket_mb(config: Config, machine: Machine) -> float:
    """Return the default size of gradient buckets on a machine, in MB.

    The size is the smallest of 25, 50, 100, ... MB for which the latency is at most 40 % of the
    time of a bucket's reduction. Sizes that would leave a stage with fewer than four buckets
    are excluded.
    """
    calls = _reductions(config)
    if not calls:
        return BUCKET_MB
    machine = machine.with_ranks(config.grid().size)

    def seconds_per_byte(nbytes: float) -> float:
        seconds = (machine.call(op, part * nbytes, members) for op, part, members in calls)
        return sum(seconds) / nbytes

    slowest = seconds_per_byte(_LONG) / (1 - _LATENCY)
    size, most = BUCKET_MB, _gradient_mb(config) / _FEWEST
    while 2 * size <= most and seconds_per_byte(1e6 * size) > slowest:
        size *= 2
    return size


def _reductions(config: Config) -> list[tuple[str, float, Sequence[int]]]:
    """Return the collectives that reduce a bucket of one byte.

    Each entry contains the operation, the number of bytes that a rank receives, and the ranks.
    """
    grid, op = config.grid(), "reduce_scatter" if config.parallel.zero else "all_reduce"
    groups = groups_of(grid, {})
    data = groups.get(plane(data_axes(grid.sizes)), range(1))
    copies = groups.get(COPIES, range(1))  # each rank reduces its own shard along this axis
    calls = (op, 1.0, data), ("all_reduce", 1 / len(data), copies)
    return [
        (op, size * received_share(op, len(members)), members)
        for op, size, members in calls
        if len(members) > 1
    ]


def _gradient_mb(config: Config) -> float:
    """Return the mean size of a stage's unsharded gradients on a rank, in MB."""
    mesh, wide = config.mesh, max(4, itemsize(config.train.dtype))
    experts = expert_parameters(config.model)
    weights = block_weights(config.model).total - experts + experts / mesh.e
    return wide * weights / (mesh.p * mesh.tensor_ranks()) / 1e6


def with_bucket_size(config: Config, machine: Machine) -> Config:
    """Return `config` with the default size of gradient buckets on `machine`, if it is unset."""
    if config.parallel.bucket_mb is not None:
        return config
    return _with_size(config, bucket_mb(config, machine))


def with_bucket_size_of_run(config: Config, machine: str | None = None) -> Config:
    """Return the configuration of a run, in which the size of gradient buckets is set.

    The size is chosen by the named `machine`. The default is the local machine if it has been
    measured, and otherwise the default machine for runs on GPUs. For other runs, the size is
    BUCKET_MB. Raises ValueError if the machine does not exist.
    """
    if config.parallel.bucket_mb is not None or config.mesh.replicas() == 1:
        return config
    try:
        path = find(machine or MEASURED, MACHINE)
    except ValueError:
        if machine:
            raise
        if config.train.backend == "numpy":
            return _with_size(config, BUCKET_MB)
        path = default_machine()
    from hpc3d.predict.machine.machine_file import load

    return with_bucket_size(config, load(path))


def _with_size(config: Config, size: float) -> Config:
    return replace(config, parallel=replace(config.parallel, bucket_mb=size))
