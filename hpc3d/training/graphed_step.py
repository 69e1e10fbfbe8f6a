"""CUDA graph of a training step: forward, backward and gradient norm in one launch.

The first step of a run launches each kernel individually, so that all kernels are compiled and all
buffers allocated. The second step is captured, and later steps replay the graph. The optimizer
update is not captured: all ranks check the loss and the gradient norm before the update, and the
update consists of only two kernels.

Inputs that change from step to step (tokens, dropout keys, the loss scale) are in arrays with
fixed addresses (`microbatch_loader._PersistentDeviceCache`).
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
    """Training steps of `trainer`, replayed from the CUDA graph `graph` (hpc3d.cuda.graph)."""

    def __init__(self, trainer: Any, graph: CudaGraph) -> None:
        self.trainer, self.graph = trainer, graph
        self.warm = self.recording = False
        self.results, self.peak = (), Counter()  # set when the graph has been captured

    def run(self, groups: Sequence[Group], micros: Mapping[int, Microbatch]) -> None:
        """Run all passes and the optimizer update of a step."""
        trainer = self.trainer
        if self.results:
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
        """End the capture, if one is in progress, and launch the graph.

        The captured passes write their outputs to the arrays `results`.
        """
        if self.recording:
            self.graph.end()
            self.recording, self.results = False, results
            self.peak = self.trainer.mesh.pool.peak
            self.launch()

    def launch(self) -> None:
        pool = self.trainer.mesh.pool
        with self.trainer.mesh.trace.span("graph", "graph"):
            self.graph.launch()
        pool.peak |= self.peak


def replay_of(trainer: Any) -> GraphedStep | None:
    """Return a GraphedStep for a trainer, or `None` if its arrays are not on a device."""
    if not trainer.mesh.pool.on_device:
        return None
    from hpc3d.cuda.graph import CudaGraph

    return GraphedStep(trainer, CudaGraph(trainer.mesh.pool.device))
