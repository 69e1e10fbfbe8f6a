"""U-Net (O. Ronneberger et al., arXiv:1505.04597): every level hands its result to its twin."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional


def _twice(inner, outer):
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outer, outer, 3, padding=1),
        nn.ReLU(),
    )


class UNet(nn.Module):
    def __init__(self, channels, levels, classes):
        super().__init__()
        sizes = [channels * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(map(_twice, [3, *sizes[:-2]], sizes[:-1]))
        self.bottom = _twice(sizes[-2], sizes[-1])
        back = sizes[::-1]
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(deep, flat, 2, 2) for deep, flat in pairwise(back)
        )
        self.joined = nn.ModuleList(_twice(2 * flat, flat) for flat in back[1:])
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, images, labels):
        x, skips = images, []
        for level in self.down:
            skips.append(level(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, joined in zip(self.up, self.joined):
            x = joined(torch.cat([skips.pop(), up(x)], 1))
        return functional.cross_entropy(self.head(x), labels)


def made(channels, levels, batch, size, classes=2):
    """The model, images [batch, 3, size, size] and a label for every point."""
    images = torch.zeros(batch, 3, size, size)
    labels = torch.zeros(batch, size, size, dtype=torch.int64)
    return UNet(channels, levels, classes), (images, labels)


def small():
    return made(4, 2, 8, 16)


def large():
    return made(64, 4, 32, 512)
