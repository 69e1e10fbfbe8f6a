"""A plain multilayer perceptron."""

import torch
from torch import nn


def small(width: int = 64, layers: int = 6, batch: int = 16):
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*parts), torch.randn(batch, width)
