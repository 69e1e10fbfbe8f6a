"""Updates of the flat parameter array, and the learning rate over the steps."""

from math import cos, pi, sqrt

from hpc3d.ops.update import adamw, descend

FLOOR = 0.1  # the part of the learning rate that is left when it has decayed
STATES = ("value", "master", "first", "second")


class Optimizer:
    """Walks through this rank's own parameters, and has done so `steps` times.  Those of 16 bits
    have a `master` copy in float32, which is updated and then rounded (Micikevicius et al.,
    arXiv:1710.03740, section 3.1)."""

    def __init__(self, parameters, weight_decay):
        self.parameters, self.weight_decay, self.master = parameters, weight_decay, None
        self.steps = 0
        if parameters.wide != parameters.dtype:
            self.master = self.state()
            for piece in parameters.pieces:
                self.master[piece.state] = parameters.value[piece.value]

    def state(self):
        """An array with an element for every parameter that this rank updates."""
        shape, dtype = (self.parameters.states,), self.parameters.wide
        return self.parameters.mesh.zeros(shape, dtype, "optimizer")

    def pieces(self, decay):
        """Values to update, their masters or None, gradients and the slice of their state; and
        the part of a value that stays."""
        for piece in self.parameters.pieces:
            keep = 1 - decay if piece.decay else 1.0
            value, grad = self.parameters.value[piece.value], self.parameters.grad[piece.grad]
            master = None if self.master is None else self.master[piece.state]
            yield (value, master, grad), piece.state, keep


class AdamW(Optimizer):
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), on this rank's blocks."""

    BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
    MOMENTS = ("first", "second")

    def __init__(self, parameters, weight_decay):
        super().__init__(parameters, weight_decay)
        self.first, self.second = self.state(), self.state()

    def update(self, learning_rate, scale):
        """One step with the gradients times `scale`.

        m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;
        w = (1 - lr decay) w - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)
        """
        self.steps += 1
        rate = learning_rate / (1 - self.BETA1**self.steps)
        root = 1 / sqrt(1 - self.BETA2**self.steps)
        for arrays, state, keep in self.pieces(learning_rate * self.weight_decay):
            moments = self.first[state], self.second[state]
            adamw(*arrays, *moments, self, (scale, rate, root, keep))


class SGD(Optimizer):
    """w = (1 - lr decay) w - lr g."""

    MOMENTS = ()

    def update(self, learning_rate, scale):
        self.steps += 1
        for arrays, _, keep in self.pieces(learning_rate * self.weight_decay):
            descend(*arrays, (learning_rate * scale, keep))


OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}


def learning_rate(train, step):
    """Linear warm-up over `train.warmup` steps, then constant, or cosine or linear to a tenth,
    where it stays once `train.decaying()` steps are done."""
    if step < train.warmup:
        return train.learning_rate * (step + 1) / train.warmup
    end = train.decaying()
    done = (step - train.warmup) / (end - train.warmup) if step < end else 1.0
    left = {"cosine": (1 + cos(pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[train.decay]
    return train.learning_rate * (FLOOR + (1 - FLOOR) * left)
