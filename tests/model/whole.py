"""The whole model as one stage, for tests of single passes."""

import numpy as np

from hpc3d.model.families import GPT2
from hpc3d.model.microbatch import microbatches
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import LayerRange, build
from hpc3d.pipeline.gradient_buckets import Buckets


class Model:
    """Stage with all layers, embedding and head, and its parameters."""

    def __init__(self, mesh, shape, split, dtype="float64", seed=5, zero=0, family=GPT2):
        self.mesh = mesh
        self.parameters = Parameters(mesh, dtype, zero)
        part = LayerRange(range(shape.layers), True, True)
        splits = {"dense": split, "experts": split}
        (self.stage,) = build(
            mesh, self.parameters, ModelSpec(family, shape, splits, seed=seed), [part]
        )
        self.parameters.allocate(seed)
        self.buckets = Buckets(self.parameters, 1e4)

    def gradients(self, tokens, targets, step=0):
        """Return the mean loss of the batch over all ranks; store gradients in the parameters."""
        self.buckets.begin()
        (micro,) = microbatches(step, tokens, targets, 1)
        loss, saved = self.stage.forward(None, micro)
        self.stage.backward(None, saved, micro, finished=self.buckets.finished)
        self.buckets.wait()
        loss = loss + self.stage.auxiliary_loss
        return float(self.mesh.world.all_reduce(np.array([loss * micro.scale])).wait()[0])

    def norm(self):
        squares = np.array([self.parameters.sum_of_squares()])
        return float(np.sqrt(self.mesh.world.all_reduce(squares).wait()[0]))
