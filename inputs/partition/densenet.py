"""DenseNet (G. Huang et al., arXiv:1608.06993): every layer of a block reads the results of all
layers before it."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, channels, growth):
        super().__init__()
        self.norm1, self.conv1 = (
            nn.BatchNorm2d(channels),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
        )
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, found):
        x = self.conv1(functional.relu(self.norm1(torch.cat(found, 1))))
        return self.conv2(functional.relu(self.norm2(x)))


class Half(nn.Sequential):
    """Between two blocks: half of the channels, and of the points along each side."""

    def __init__(self, channels):
        conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(), conv, nn.AvgPool2d(2))


class DenseNet(nn.Module):
    def __init__(self, blocks, growth, classes):
        super().__init__()
        channels, layers = 2 * growth, []
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        for block, count in enumerate(blocks):
            if block:
                layers.append(Half(channels))
                channels //= 2
            for _ in range(count):
                layers.append(Layer(channels, growth))
                channels += growth
        self.layers, self.norm = nn.ModuleList(layers), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)

    def forward(self, images, labels):
        found = [self.stem(images)]
        for layer in self.layers:
            if isinstance(layer, Half):
                found = [layer(torch.cat(found, 1))]
            else:
                found.append(layer(found))
        x = functional.relu(self.norm(torch.cat(found, 1))).mean((2, 3))
        return functional.cross_entropy(self.head(x), labels)


def made(blocks, growth, batch, size=224, classes=1000):
    """The model, images [batch, 3, size, size] and labels [batch]."""
    images, labels = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.int64)
    return DenseNet(blocks, growth, classes), (images, labels)


def small():
    return made((2, 3), 4, 8, 32, 10)


def densenet121():
    """8.0 million parameters, on a batch of 256."""
    return made((6, 12, 24, 16), 32, 256)


def large():
    """DenseNet-264 with 48 channels a layer, on a batch of 256."""
    return made((6, 12, 64, 48), 48, 256)
