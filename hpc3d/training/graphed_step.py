"""A step as one launch: forward, backward and the norm of the gradient are a CUDA graph.

The first step of a run goes kernel by kernel, so that all is compiled, chosen and in its place;
the second one is recorded; from then on the host launches the record.  The update is not in it:
before it all ranks look at loss and norm, and it is two kernels.

What changes from step to step (tokens, keys of dropout, the factor of the loss) lies in arrays
that keep their place (feed.Standing).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpc3d.cuda.graph import CudaGraph
    from hpc3d.model.microbatch import Microbatch
    from hpc3d.pipeline.passes import Group


class GraphedStep:
    """Runs the steps of `trainer` by `graph` (hpc3d.cuda.graph)."""

    def __init__(self, trainer: Any, graph: CudaGraph) -> None:
        self.trainer, self.graph = trainer, graph
        self.warm = self.recording = self.done = False
        self.results, self.peak = (), Counter()

    def run(self, groups: Sequence[Group], micros: Mapping[int, Microbatch]) -> None:
        """All passes of a step, and its update."""
        trainer = self.trainer
        if self.done:
            trainer.engine.seconds.clear()
            self.launch()
            trainer.update_by(*self.results)
            return
        if self.warm:
            self.recording = True
            self.graph.begin()
        trainer.engine.run(groups, micros)
        self.warm = True

    def close(self, *results: Any) -> None:
        """The passes are posted, and gave these arrays: if they were recorded, launch them."""
        if self.recording:
            self.graph.end()
            self.recording, self.done, self.results = False, True, results
            self.peak = self.trainer.mesh.pool.peak
            self.launch()

    def launch(self) -> None:
        pool = self.trainer.mesh.pool
        with self.trainer.mesh.trace.span("graph", "graph"):
            self.graph.launch()
        pool.peak |= self.peak


def replay_of(trainer: Any) -> GraphedStep | None:
    """The GraphedStep of a trainer on a device, None where nothing runs."""
    if not trainer.mesh.pool.on_device:
        return None
    from hpc3d.cuda.graph import CudaGraph

    return GraphedStep(trainer, CudaGraph(trainer.mesh.pool.device))
