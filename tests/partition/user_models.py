"""Models with outputs, inputs, tensors and wrappers that torch.export rejects directly."""

import dataclasses
from types import SimpleNamespace

import torch
from torch import nn

from hpc3d.partition.capturing.user_module import unwrapped

HERE = "tests.partition.user_models"
BATCH, WIDTH = 8, 6


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def loss(self, x):
        return (self.b(torch.relu(self.a(x))) ** 2).mean()

    def forward(self, x):
        return self.loss(x)


def rows(seed=1):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=draws)


def ready(module):
    return unwrapped(module).double(), (rows(),)


# Outputs


@dataclasses.dataclass
class Result:
    loss: torch.Tensor
    cache: object


class Cache:
    def __init__(self, keys):
        self.keys = keys


class Returns(Base):
    """Returns a function of the loss."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self.loss(x))


OUTPUTS = {
    "metric_first": (lambda loss: {"perplexity": loss.exp(), "loss": loss}, "loss"),
    "logged": (lambda loss: {"log": loss.detach(), "loss": loss}, "loss"),
    "detached_loss": (lambda loss: {"loss": loss.detach(), "total": loss}, "total"),
    "zeros_first": (lambda loss: (torch.zeros_like(loss), loss), "1"),
    "dataclass": (lambda loss: Result(loss, Cache(loss + 1)), "loss"),
    "with_cache": (lambda loss: {"cache": Cache(loss + 1), "loss": loss}, "loss"),
    "attributes": (lambda loss: SimpleNamespace(perplexity=loss.exp(), loss=loss), "loss"),
    "nested": (lambda loss: ({"x": [loss * 2, {"loss": loss}]}, None), "0.x.1.loss"),
}


def returns(kind):
    return ready(Returns(OUTPUTS[kind][0]))


# Inputs and wrappers


class Star(Base):
    def forward(self, *args, **kwargs):
        return self.loss(args[0] * kwargs.get("scale", 1.0))


class Named(Base):
    def forward(self, x, **kwargs):
        return self.loss(x + kwargs["y"])


def star():
    return ready(Star())


def named():
    module, (x,) = ready(Named())
    return module, {"x": x, "y": rows(2)}


def compiled():
    return ready(torch.compile(Base()))


def parallel():
    return ready(nn.DataParallel(Base()))


def wrapped():
    return nn.DataParallel(Base()), rows()


class Compiled(Base):
    """A compiled layer and a compiled function."""

    def __init__(self):
        super().__init__()
        self.a = torch.compile(self.a)
        self.doubled = torch.compile(lambda x: 2 * x)

    def forward(self, x):
        return self.loss(self.doubled(x))


def compiled_inside():
    return ready(Compiled())


class Twice(Base):
    """One BatchNorm that is called twice."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return (self.b(self.norm(torch.relu(self.norm(self.a(x))))) ** 2).mean()


def twice():
    return ready(Twice())


# Tensors


class Constants(Base):
    """A buffer that is not saved, and tensors in attributes, lists, dicts and objects."""

    def __init__(self):
        super().__init__()
        numbers = torch.arange(WIDTH, dtype=torch.float64)
        self.register_buffer("angles", numbers, persistent=False)
        self.plain, self.listed = numbers.sin(), [numbers.cos()]
        self.keyed = {"k": (numbers / 7,)}
        self.held = SimpleNamespace(table=numbers.exp())

    def forward(self, x):
        x = x + self.angles.cos() * self.plain + self.listed[0] * self.keyed["k"][0]
        x = x + self.held.table / 100 + torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=x.dtype)
        return self.loss(x)


def constants():
    return ready(Constants())


def spectral():
    module, inputs = ready(Base())
    nn.utils.parametrizations.spectral_norm(module.b)
    return module, inputs


class Idle(Base):
    """Two parameters and a buffer that forward does not read, and one that is empty."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.register_buffer("note", torch.ones(2))
        self.register_buffer("seen", torch.empty(0))
        self.counts = nn.Parameter(torch.empty(0, 3))


def idle():
    return ready(Idle())


class Untrained(Base):
    """Matrices that only no_grad code, a metric or an unused branch reads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH, WIDTH), 0.5))
        self.probe, self.extra = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        with torch.no_grad():
            x = x @ self.scale
        self.extra(x)
        return {"probe": self.probe(x).mean(), "loss": self.loss(x)}


def untrained():
    return ready(Untrained())


# Factories


class Initialized(Base):
    """Reads the values of tensors when it is created."""

    def __init__(self):
        super().__init__()
        nn.init.trunc_normal_(self.a.weight, std=0.2)
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]
        self.more = torch.linspace(1, 2, 3).tolist()
        self.positive = bool((self.b.weight > 0).any())

    def forward(self, x):
        return self.loss(x * (1 - self.rates[1]) + self.more[2] * self.positive)


def initialized():
    return ready(Initialized())


def read_rates():
    """A number that is read, but not used before the module is called."""
    module = Star()
    module.rate = torch.linspace(0.25, 0.5, 2)[1].item()
    return ready(module)


def fails_with_data():
    raise LookupError(f"no such size: {torch.ones(3).sum().item()}")
