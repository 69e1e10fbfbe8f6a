"""Models whose forward pass uses two layers and the inputs, for the static checks."""

import torch
from torch import nn

from hpc3d.partition.capture import capture, checked

SAMPLES, WIDTH = 8, 6


class Layers(nn.Module):
    """Model that returns `function(model, x)`."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.function = function

    def squares(self, x):
        return self.b(torch.relu(self.a(x))) ** 2

    def forward(self, x):
        return self.function(self, x)


def values(*shape, seed=1):
    """Return random values, with the same rows in every call."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=draws)


def captured_function(function):
    return capture(Layers(function), (values(SAMPLES, WIDTH),))


def refusal(function):
    """Return the error message for a function, or `None`."""
    try:
        checked(captured_function(function))
    except ValueError as error:
        return str(error)
    return None
