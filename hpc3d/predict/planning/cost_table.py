"""Cache of the costs of passes, gradient reductions, optimizer updates and messages.

Many layouts of a search have costs in common. The cache key of a cost contains all values that the
cost depends on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from hpc3d.comm.mesh import CONTEXT, COPIES, DATA
from hpc3d.model.stage import FIRST, LAST
from hpc3d.pipeline.schedule import find
from hpc3d.predict.machine.between_hosts import legs
from hpc3d.predict.planning.pass_costs import NOTHING, LayerSample, PartCosts
from hpc3d.trace.schema import MESSAGES
from hpc3d.training.graphed_step import captured

if TYPE_CHECKING:
    from hpc3d.config.input_file import Config, MeshConfig
    from hpc3d.predict.machine.machine import Machine
    from hpc3d.predict.planning.pass_costs import Pass, StageContent

_TOKEN = 4  # bytes per token
_MESSAGE_COSTS = ("message", "handled")  # names of costs computed without running the program


def _key_of(cost: str, config: Config, **values: Any) -> tuple:
    """Return the cache key of a cost; only some costs depend on the additional `values`."""
    train, parallel, axes = config.train, config.parallel, _axes_of(config.mesh)
    return (
        cost,
        train.backend,
        train.dtype,
        train.fused_gelu,
        train.cuda_graph and captured(config),
        config.tensor_split,
        tuple([axes[axis] for axis in axes if axis in "exyz"]),
        axes[CONTEXT],
        parallel.context,
        parallel.ulysses,
        parallel.attention,
        parallel.compression,
        parallel.compression_rank,
        parallel.compression_share,
        parallel.reduce_dtype,
        parallel.local_steps,
        parallel.outer_momentum > 0,
        parallel.sync,
        parallel.prefetch,
        parallel.chunked_products,
        *values.items(),
    )


@cache
def _axes_of(mesh: MeshConfig, shard: int = 0) -> dict[str, tuple[str, int, int]]:
    """Return a dict from axis to (axis, size, stride); axes of size 1 have stride 0."""
    grid = mesh.grid(shard)
    return {
        axis: (axis, size, grid.stride(axis) if size > 1 else 0)
        for axis, size in grid.sizes.items()
    }


def _data_axes_of(config: Config) -> tuple:
    """Return the entries of `_axes_of` for the axes of the replicas: COPIES, if used, and d."""
    axes = _axes_of(config.mesh, config.parallel.group)
    return axes.get(COPIES), axes[DATA]


class CostTable:
    """Cache of the costs of a model with vocabulary size `vocabulary` on a machine.

    Each cost is computed when it is first needed. `measured` is the number of costs obtained by
    running the program on abstract arrays.
    """

    def __init__(self, vocabulary: int, machine: Machine) -> None:
        self.vocabulary, self.machine = vocabulary, machine
        self.measured = 0
        self._found: dict[tuple, Any] = {}

    def _once(self, key: tuple, measure: Callable[[], Any]) -> Any:
        cost = self._found.get(key)
        if cost is None:
            cost = self._found[key] = measure()
            self.measured += key[0] not in _MESSAGE_COSTS
        return cost

    def sample(
        self, config: Config, zero: int, keep: bool = True, recompute: str = "none"
    ) -> LayerSample:
        """Return the LayerSample of a layout with the given ZeRO stage and memory options."""
        mesh, parallel = config.mesh, config.parallel
        both = mesh.p == 1 or find(parallel.schedule).v_shaped
        ends = ((FIRST, LAST),) if both else ((FIRST,), (LAST,))
        ends = ends if recompute == "none" else ()  # recomputation applies to layers only

        def measure():
            changed = replace(parallel, zero=zero, keep_gathered=keep, recompute=recompute)
            layout = replace(config, parallel=changed)
            return LayerSample(layout, self.vocabulary, self.machine, ends)

        key = _key_of(
            "sample",
            config,
            zero=zero,
            keep=keep,
            recompute=recompute,
            together=both,
            data=_data_axes_of(config),
        )
        return self._once(key, measure)

    def parts(self, config: Config) -> PartCosts:
        """Return the costs of one microbatch in a layer, in the embedding and in the head."""
        parallel, mesh = config.parallel, config.mesh
        sequences = config.train.batch // parallel.microbatches
        halves = find(parallel.schedule).splits_backward
        # Only ZeRO 2 and 3 communicate during the passes.
        zero = parallel.zero if parallel.zero > 1 and mesh.replicas() > 1 else 0
        keep, recompute = parallel.keep_gathered, parallel.recompute
        values = {
            "zero": zero,
            "keep": keep,
            "sequences": sequences // mesh.d,
            "halves": halves,
            "data": _data_axes_of(config) if zero else None,
        }

        def ends():
            sample = self.sample(config, zero, keep)
            return [sample.passes(part, sequences, halves) for part in (FIRST, LAST)]

        def measure():
            sample = self.sample(config, zero, keep, recompute)
            stage = sample.stages[sample.layers]
            rows, columns = stage.block_of(sequences * config.model.sequence)
            block = rows * columns * np.dtype(config.train.dtype).itemsize
            layer, kinds = sample.layer_passes(sequences, halves)
            workspace = sample.pool.shared_workspace
            first, last = self._once(_key_of("ends", config, **values), ends)
            return PartCosts(layer, first, last, block, kinds, workspace)

        return self._once(_key_of("parts", config, recompute=recompute, **values), measure)

    def held(self, config: Config, stage: StageContent) -> Counter:
        """Return the sizes in bytes of a stage's parameters, gradients and optimizer state."""
        return self.sample(config, config.parallel.zero).held_by(stage)

    def layer_gradient(self, config: Config) -> int:
        """Return the size in bytes of the gradients of all layers in the LayerSample."""
        return self.sample(config, config.parallel.zero).layer_gradient

    def update(self, config: Config, stage: StageContent) -> tuple[Pass, Pass, Pass]:
        """Return the costs of a stage's gradient reductions, optimizer update and all-gathers of
        updated values (see `LayerSample.update`)."""
        sample = self.sample(config, config.parallel.zero)
        layer = sample.layer_gradient
        times = sample.held_by(stage)["gradient"] / layer
        most = max(1.0, config.parallel.bucket_bytes)

        def measure():
            return sample.update(times, most, stage.layers)

        values = {"zero": config.parallel.zero, "data": _data_axes_of(config)}
        return self._once(_key_of("update", config, times=times, most=most, **values), measure)

    def message(self, config: Config, nbytes: float) -> float:
        """Return the mean transfer time of a message to the next stage, in seconds."""
        machine = self.machine.captured if captured(config) else self.machine

        def seconds(pair):
            if not machine.cores:
                return machine.dispatch_s + machine.call("send", nbytes, pair)
            return legs(self.machine, "send", nbytes, pair).wired + self.machine.wakeup_s

        return self._between_stages("message", config, nbytes, seconds)

    def handled(self, config: Config, nbytes: float) -> Pass:
        """Return the mean CPU cost of sending or receiving a message between stages."""

        def work(pair):
            return mean(legs(self.machine, op, nbytes, pair).work for op in MESSAGES)

        seconds = self._between_stages("handled", config, nbytes, work)
        return NOTHING._replace(seconds=seconds, waits=Counter(p=seconds), busy=seconds)

    def _between_stages(
        self,
        cost: str,
        config: Config,
        nbytes: float,
        seconds: Callable[[tuple[int, int]], float],
    ) -> float:
        if config.mesh.p == 1:
            return 0.0

        def measure():
            column = config.grid().ranks_along("p", {})
            return mean(map(seconds, pairwise(column)))

        pipeline = _axes_of(config.mesh)["p"]
        return self._once(_key_of(cost, config, nbytes=nbytes, pipeline=pipeline), measure)

    def tied_exchange(self, config: Config, stages: Sequence[StageContent]) -> Pass:
        """Return the cost of the gradient exchange between the two copies of a tied embedding."""
        if not config.model.tied or config.mesh.p == 1 or stages[0].last:
            return NOTHING
        ends = config.grid().ranks_along("p", {})
        nbytes = self.sample(config, config.parallel.zero).held[(FIRST,)]["gradient"]
        return self._call("p", "send", nbytes, (ends[0], ends[-1]))

    def world(self, config: Config) -> Pass:
        """Return the cost of a step's communication among all ranks.

        It consists of the broadcast of the batch and three all-reduces of one element each.
        """
        ranks = range(config.grid().size)
        if len(ranks) == 1:
            return NOTHING
        batch = 2 * config.train.batch * config.model.sequence * _TOKEN
        element = self._call("world", "all_reduce", 8, ranks)
        return self._call("world", "broadcast", batch, ranks) + element * 3

    def _call(self, axis: str, op: str, nbytes: float, members: Sequence[int]) -> Pass:
        if not self.machine.cores:
            seconds = self.machine.call(op, nbytes, members)
            waits = Counter({axis: seconds})
            return NOTHING._replace(seconds=seconds, waits=waits, idle=waits)
        work, wired = legs(self.machine, op, nbytes, members)
        seconds, idle = work + wired + self.machine.wakeup_s, Counter({axis: wired})
        return NOTHING._replace(
            seconds=seconds, waits=Counter({axis: seconds}), busy=work, idle=idle
        )
