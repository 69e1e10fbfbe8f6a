"""Models that capture must accept, and factories that it rejects."""

from functools import cache

import torch
from torch import nn
from torch.nn import functional

from hpc3d.partition.capture import capture
from hpc3d.partition.factory import made

HERE = "tests.partition.sample_models"


@cache
def captured(name):
    """Return the Captured of `MODULE:FACTORY`."""
    return capture(*made(name))


def small(name):
    """Return the small model of one of inputs/partition."""
    return captured(f"inputs.partition.{name}:small")


class Branches(nn.Module):
    """A value with two readers, a mean broadcast to all rows, memory that is written to, and a
    mask that no input affects."""

    def __init__(self, width=8):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width)
        self.out.weight = self.left.weight

    def forward(self, x):
        x = self.norm(x)
        one = self.left(x).relu_()
        mask = torch.ones(x.shape[1], x.shape[1]).tril().sum(0)
        two, three = (self.right(x) * mask).chunk(2, 1)
        centred = torch.cat([two, three], 1) - one.mean()
        return self.out(one + centred)


def branches():
    return Branches(), torch.zeros(6, 8)


class Decides(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x
        return -x


def decides():
    return Decides(), torch.zeros(4, 4)


def nothing():
    return None


def fails():
    raise RuntimeError("no such size")


def without_batch():
    return nn.Identity(), torch.tensor(1.0)


def sized(width, batch):
    return nn.Linear(width, width), torch.zeros(batch, width)


def one_sample():
    return nn.Linear(2, 2), torch.zeros(1, 2)


class Sequence(nn.Module):
    """The batch is in dimension 1, so the model cannot be cut."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = x.transpose(0, 1)
        return functional.gelu(self.two(functional.gelu(self.one(x)))).transpose(0, 1)


def time_first():
    return Sequence(), torch.zeros(4, 3, 4)


def by_name():
    """Inputs by their names, one of which is a number."""

    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return {"y": super().forward(x) * scale}

    return Scaled(4, 4), {"x": torch.zeros(4, 4), "scale": 2.0}


def copies_of_a_layer():
    """Copies of a layer, as in nn.TransformerEncoder."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2), torch.zeros(4, 3, 8)


def looks_into_its_weights():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    module[0].weight.detach().numpy()[:] = 1.0
    return module, torch.zeros(4, 4)


class Held(nn.Module):
    """A table that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.table = torch.ones(4)

    def forward(self, x):
        return x * self.table


def held():
    return Held(), torch.zeros(4, 4)


class Function(nn.Module):
    """A layer, and a function of its result and the input."""

    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.layer(x), x)


def leaves():
    raise SystemExit(3)


def picks():
    return Function(lambda y, x: y[x[:, 0] > 0]), torch.zeros(4, 4)


def contrasts():
    return Function(lambda y, x: y @ x.T), torch.zeros(4, 4)


def fixes_its_batch():
    return Function(lambda y, x: y + torch.ones(4, 4)), torch.zeros(4, 4)


class Untaught(nn.Module):
    """Blocks without gradient: of values, of an average and a counter (nested), one that enables
    gradients, one with a value that is used outside, and disabled autocast."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        y = torch.tanh(self.one(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.mean(0) * 0.1)
            self.seen += 1
            largest = y.amax(1, keepdim=True) + self.two.weight.mean()
            with torch.enable_grad():
                taught = self.two(y) * largest
            z = y * self.one.bias
        with torch.autocast("cpu", enabled=False):
            y = torch.sin(self.two(y - largest)) * self.average
            with torch.no_grad():
                z = z * taught + y
        w = self.one(y)
        with torch.no_grad():
            w.clamp_(-0.5, 0.5)
        return {"y": y * z + taught, "w": torch.sin(w), "z": self.two(z)}


def untaught():
    return Untaught(), torch.zeros(6, 4)


class Shrinks(nn.Linear):
    """A layer that changes its own bias."""

    def forward(self, x):
        with torch.no_grad():
            self.bias.mul_(0.5)
        return super().forward(x)


def trains_itself():
    return Shrinks(4, 4), torch.zeros(4, 4)


class Rounded(torch.autograd.Function):
    """Straight-through estimator, whose gradient is not that of its operations."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def rounds():
    return Function(lambda y, x: Rounded.apply(y) + x), torch.zeros(4, 4)


def halves():
    def function(y, x):
        with torch.autocast("cpu", torch.bfloat16):
            return y @ torch.ones(4, 4)

    return Function(function), torch.zeros(4, 4)


def maps():
    return Function(torch.func.vmap(torch.dot)), torch.zeros(4, 4)


def contracts():
    return Function(lambda y, x: torch.einsum("bi,bi->b", y, x)), torch.zeros(4, 4)


def repeats():
    return Function(lambda y, x: y[:, None].expand(-1, 4, -1).reshape(-1, 16)), torch.zeros(4, 4)


class Counts(nn.Module):
    """A buffer of a module without operations, which is read before it is written."""

    def __init__(self):
        super().__init__()
        self.state = nn.Module()
        self.state.register_buffer("seen", torch.zeros(4))
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.two(self.one(x) + self.state.seen)
        self.state.seen.copy_(y.mean(0))
        return y


def counts():
    return Counts(), torch.zeros(6, 4)


class Averages(nn.Module):
    """Moving average that the model itself updates; its layers may read the average."""

    def __init__(self, read):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("ema", torch.zeros(4))
        self.read = read

    def forward(self, x):
        with torch.no_grad():
            self.ema.mul_(0.9).add_(x.mean(0))
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + self.ema if self.read else x
        return x


def averages(read=False):
    return Averages(read), torch.zeros(6, 4)


class Mixed(nn.Linear):
    """Layer with parameters of two data types."""

    def __init__(self):
        super().__init__(4, 4)
        self.second = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x):
        return (super().forward(x).double() @ self.second).mean()


def mixed_types():
    return Mixed(), torch.zeros(6, 4)
