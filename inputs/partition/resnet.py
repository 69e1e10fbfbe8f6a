"""ResNet (K. He et al., arXiv:1512.03385) of any width, with its loss for 1000 classes."""

import torch
from torch import nn
from torch.nn import functional


class Bottleneck(nn.Module):
    def __init__(self, channels, narrow, stride):
        super().__init__()
        wide = 4 * narrow
        self.conv1, self.norm1 = nn.Conv2d(channels, narrow, 1, bias=False), nn.BatchNorm2d(narrow)
        self.conv2 = nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(narrow)
        self.conv3, self.norm3 = nn.Conv2d(narrow, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != wide:
            shorter = nn.Conv2d(channels, wide, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shorter, nn.BatchNorm2d(wide))

    def forward(self, x):
        y = functional.relu(self.norm1(self.conv1(x)))
        y = functional.relu(self.norm2(self.conv2(y)))
        return functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, blocks, width=1, narrow=64, classes=1000):
        super().__init__()
        channels = narrow * width
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        layers, inner = [], narrow * width
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(channels, inner, stride))
                channels = 4 * inner
            inner *= 2
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(channels, classes)

    def forward(self, images, labels):
        x = self.layers(self.stem(images)).mean((2, 3))
        return functional.cross_entropy(self.head(x), labels)


def made(blocks, batch, size=224, classes=1000, **sizes):
    """The model, images [batch, 3, size, size] and labels [batch]."""
    images, labels = torch.zeros(batch, 3, size, size), torch.zeros(batch, dtype=torch.int64)
    return ResNet(blocks, classes=classes, **sizes), (images, labels)


def small():
    return made((1, 1, 1), 8, 32, 10, narrow=4)


def resnet152_x8():
    """3.7 billion parameters, on a batch of 512."""
    return enlarged(152, 8)


def enlarged(depth, width, batch=512):
    """ResNet-50, 101 or 152 with `width` times as many channels; arXiv:2103.16063 has width 8."""
    blocks = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
    return made(blocks[depth], batch, width=width)
