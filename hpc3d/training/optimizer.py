"""Updates of the flat parameter array, and the learning rate over the steps."""

from itertools import pairwise
from math import cos, pi, sqrt

import numpy as np

from hpc3d.cluster.arrays import kernel

CHUNK = 1 << 14  # elements that stay in the cache through an update
FLOOR = 0.1  # the part of the learning rate that is left at the last step


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), on this rank's blocks."""

    BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8

    def __init__(self, parameters, weight_decay):
        self.parameters, self.weight_decay, self.steps = parameters, weight_decay, 0
        mesh, shape = parameters.mesh, (parameters.states,)
        self.first = mesh.zeros(shape, parameters.dtype, "optimizer")
        self.second = mesh.zeros(shape, parameters.dtype, "optimizer")

    def update(self, learning_rate, scale):
        """One step with the gradients times `scale`.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps += 1
        rate = learning_rate / (1 - self.BETA1**self.steps)
        root = 1 / sqrt(1 - self.BETA2**self.steps)
        for w, g, state, keep in pieces(self.parameters, learning_rate * self.weight_decay):
            adamw(w, g, self.first[state], self.second[state], self, (scale, rate, root, keep))


@kernel
def adamw(value, grad, first, second, constants, factors):
    """Update a stretch of values and its state, in pieces that fit the cache."""
    scale, rate, root, keep = factors
    for part in stretches(value.size):
        w, g, m, v = value[part], grad[part] * scale, first[part], second[part]
        m *= constants.BETA1
        m += g * (1 - constants.BETA1)
        v *= constants.BETA2
        g *= g
        g *= 1 - constants.BETA2
        v += g
        np.sqrt(v, out=g)
        g *= root
        g += constants.EPSILON
        np.divide(m, g, out=g)
        g *= rate
        w *= keep
        w -= g


class SGD:
    """w = (1 - lr decay) w - lr g."""

    def __init__(self, parameters, weight_decay):
        self.parameters, self.weight_decay = parameters, weight_decay

    def update(self, learning_rate, scale):
        for w, g, _, keep in pieces(self.parameters, learning_rate * self.weight_decay):
            descend(w, g, learning_rate * scale, keep)


@kernel
def descend(value, grad, rate, keep):
    for part in stretches(value.size):
        value[part] *= keep
        value[part] -= grad[part] * rate


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}


def pieces(parameters, decay):
    """Values, gradients and the slice of their state; and the part of the value that stays."""
    for piece in parameters.pieces:
        keep = 1 - decay if piece.decay else 1.0
        yield parameters.value[piece.value], parameters.grad[piece.grad], piece.state, keep


def stretches(size):
    """Slices of a flat array that fit the cache."""
    edges = [*range(0, size, CHUNK), size]
    return [slice(*edge) for edge in pairwise(edges)]


def learning_rate(train, step):
    """Linear warm-up over `train.warmup` steps, then cosine or linear to a tenth, or constant."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    left = {"cosine": (1 + cos(pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[train.decay]
    return train.learning_rate * (FLOOR + (1 - FLOOR) * left)
