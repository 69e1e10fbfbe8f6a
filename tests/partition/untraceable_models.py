"""Models with modules that torch.export cannot trace."""

import torch
from torch import nn
from torch.nn import functional

from tests.partition.sample_models import Rounded

HERE = "tests.partition.untraceable_models"


class Choosy(nn.Module):
    """Every sample uses one of two layers, depending on its values."""

    def __init__(self, width=4):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, *, scale=1.0):
        rows = [self.left(row) if row.sum().item() > 0 else self.right(row).tanh() for row in x]
        return scale * torch.stack(rows)


class Experts(nn.Module):
    """The same with any number of rows per layer; also returns the selected layer."""

    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x):
        chosen, y = (x.sum(1) > 0).long(), torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            rows = torch.nonzero(chosen == number)[:, 0]
            y = y.index_add(0, rows, layer(x[rows]))
        return {"y": y, "chosen": [chosen, None]}


class Straight(nn.Module):
    """A custom gradient, and a stored average."""

    def __init__(self, width=4):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return Rounded.apply(3 * self.norm(x)) * self.scale


class Between(nn.Module):
    """Some of these modules between layers that can be traced."""

    def __init__(self, *parts):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.parts = nn.ModuleList(parts)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in parts)

    def forward(self, x, y):
        x = torch.tanh(self.first(x))
        for part, layer in zip(self.parts, self.layers):
            z = part(x.clone())
            z = x * z if isinstance(z, float) else z
            z = z["y"] * (1 + z["chosen"][0])[:, None] if isinstance(z, dict) else z
            x = x + functional.gelu(layer(z))
        return functional.mse_loss(x, y)


def samples(batch=12):
    numbers = torch.arange(batch * 4, dtype=torch.float64).reshape(batch, 4)
    return torch.sin(numbers), torch.cos(numbers)


def choosy():
    return Between(Choosy()).double(), samples()


def three():
    return Between(Choosy(), Choosy(), Choosy()).double(), samples()


def experts():
    return Between(Experts(), Experts()).double(), samples()


def straight():
    return Between(Straight(), Choosy()).double(), samples()


class Around(nn.Module):
    """A module inside which another untraceable module is the only problem."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(4, 4)

    def forward(self, x):
        return self.last(x * self.inner(x))


def decided(x):
    """A number that cannot be traced."""
    return 1.5 if x.sum().item() > 0 else 0.5


class Number(nn.Module):
    def forward(self, x):
        return decided(x)


class Picks(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0].mean(0) + x.detach() * decided(x)


class Draws(nn.Module):
    def forward(self, x):
        return functional.dropout(x * decided(x), 0.5)


class Remembers(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = 0.0

    def forward(self, x):
        self.last = decided(x)
        return x * self.last


class Writes(nn.Module):
    def forward(self, x):
        return x.mul_(decided(x))


class Borrows(nn.Module):
    def __init__(self):
        super().__init__()
        self.others = [nn.Linear(4, 4).double()]

    def forward(self, x):
        return self.others[0](x) * decided(x)


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.ones(4, dtype=torch.float64)

    def forward(self, x):
        return x * self.table * decided(x)


class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError(f"{decided(x)} is no number of mine")


KINDS = (Number, Picks, Draws, Remembers, Writes, Borrows, Holds, Raises)


def alone(kind):
    """One of these modules in a model that does nothing else."""
    (found,) = (each for each in KINDS if each.__name__ == kind)
    return Between(found()).double(), samples()


def of(*kinds):
    """Several of those that may remain single operations, in float32."""
    parts = [globals()[kind]() for kind in kinds]
    return Between(*parts), tuple(each.float() for each in samples())


def around():
    return Between(Around(Number())).double(), samples()
