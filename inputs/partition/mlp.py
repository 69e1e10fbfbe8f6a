"""A plain multilayer perceptron; and one with a loss, which learns from points that it is given
by the number of a step."""

import torch
from torch import nn
from torch.nn import functional


def small(width: int = 64, layers: int = 6, batch: int = 16):
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts), torch.randn(batch, width)


class Regression(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, width),
            *[nn.Sequential(nn.GELU(), nn.Linear(width, width)) for _ in range(layers)],
            nn.GELU(),
            nn.Linear(width, 1),
        )

    def forward(self, x, y):
        return functional.mse_loss(self.layers(x), y)


def regression(width: int = 256, layers: int = 4, batch: int = 256):
    """The perceptron, points [batch, 8] and their values [batch, 1]."""
    return Regression(width, layers), points(0, batch)


def points(step: int, batch: int = 256):
    """Other points in every step, and their distances from the origin."""
    x = torch.randn(batch, 8, generator=torch.Generator().manual_seed(step))
    return x, x.norm(dim=1, keepdim=True)


def held_out_points(number: int, batch: int = 256):
    """Points of evaluation batch `number`, which training does not use."""
    return points(10**6 + number, batch)
