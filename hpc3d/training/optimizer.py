"""Updates of the flat parameter array, and the learning rate over the steps."""

from math import cos, pi, sqrt

import numpy as np

CHUNK = 1 << 14  # elements that stay in the cache through an update
FLOOR = 0.1  # the part of the learning rate that is left at the last step


class AdamW:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), on this rank's blocks."""

    BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8

    def __init__(self, parameters, weight_decay):
        self.parameters, self.weight_decay, self.steps = parameters, weight_decay, 0
        mesh, like = parameters.mesh, parameters.value
        self.first = mesh.zeros(like.shape, like.dtype, "optimizer")
        self.second = mesh.zeros(like.shape, like.dtype, "optimizer")

    def update(self, learning_rate, scale):
        """One step with the gradients times `scale`.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps += 1
        rate = learning_rate / (1 - self.BETA1**self.steps)
        root = 1 / sqrt(1 - self.BETA2**self.steps)
        for part, keep in chunks(self.parameters, learning_rate * self.weight_decay):
            w, m, v = self.parameters.value[part], self.first[part], self.second[part]
            g = self.parameters.grad[part] * scale
            m *= self.BETA1
            m += g * (1 - self.BETA1)
            v *= self.BETA2
            g *= g
            g *= 1 - self.BETA2
            v += g
            np.sqrt(v, out=g)
            g *= root
            g += self.EPSILON
            np.divide(m, g, out=g)
            g *= rate
            w *= keep
            w -= g


class SGD:
    """w = (1 - lr decay) w - lr g."""

    def __init__(self, parameters, weight_decay):
        self.parameters, self.weight_decay = parameters, weight_decay

    def update(self, learning_rate, scale):
        for part, keep in chunks(self.parameters, learning_rate * self.weight_decay):
            w = self.parameters.value[part]
            w *= keep
            w -= self.parameters.grad[part] * (learning_rate * scale)


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}


def chunks(parameters, decay):
    """Slices of the flat arrays that fit the cache, each with the part of a weight that stays."""
    for group, part in parameters.parts.items():
        keep = 1 - decay if group.decay else 1.0
        for start in range(part.start, part.stop, CHUNK):
            yield slice(start, min(start + CHUNK, part.stop)), keep


def learning_rate(train, step):
    """Linear warm-up over `train.warmup` steps, then cosine or linear to a tenth, or constant."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    done = (step - train.warmup) / max(1, train.steps - train.warmup)
    left = {"cosine": (1 + cos(pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[train.decay]
    return train.learning_rate * (FLOOR + (1 - FLOOR) * left)
