"""A Transformer that translates (A. Vaswani et al., arXiv:1706.03762), with its loss: every layer
of the decoder reads the result of the encoder, and one table is the embedding of both and the
head."""

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    def __init__(self, hidden, heads, causal=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q, self.kv = nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x, memory):
        q = self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(memory).unflatten(2, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One of the encoder, or, with `crossing`, of the decoder."""

    def __init__(self, hidden, heads, dropout, crossing):
        super().__init__()
        self.dropout = dropout
        self.own, self.norm1 = Attention(hidden, heads, crossing), nn.LayerNorm(hidden)
        self.cross = Attention(hidden, heads) if crossing else None
        self.norm2 = nn.LayerNorm(hidden) if crossing else None
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm3 = nn.LayerNorm(hidden)

    def forward(self, x, memory=None):
        x = self.norm1(x + self._dropped(self.own(x, x)))
        if self.cross is not None:
            x = self.norm2(x + self._dropped(self.cross(x, memory)))
        return self.norm3(x + self._dropped(self.down(functional.relu(self.up(x)))))

    def _dropped(self, x):
        return functional.dropout(x, self.dropout, self.training)


class Translator(nn.Module):
    def __init__(self, hidden, layers, heads, vocabulary, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        sizes = hidden, heads, dropout
        self.encoder = nn.ModuleList(Layer(*sizes, crossing=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(*sizes, crossing=True) for _ in range(layers))

    def _embedded(self, ids):
        """The rows of the table, and sines of the places in the sequence."""
        hidden = self.tokens.embedding_dim
        rates = 10_000 ** (-torch.arange(0, hidden, 2, device=ids.device) / hidden)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * rates
        return self.tokens(ids) * hidden**0.5 + torch.cat([angles.sin(), angles.cos()], 1)

    def forward(self, source, target, labels):
        memory = self._embedded(source)
        for layer in self.encoder:
            memory = layer(memory)
        x = self._embedded(target)
        for layer in self.decoder:
            x = layer(x, memory)
        logits = functional.linear(x, self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def made(hidden, layers, heads, batch, sequence, vocabulary=37_000):
    """The model with `layers` in each half; ids of source and target, and labels, all
    [batch, sequence]."""
    ids = torch.zeros(batch, sequence, dtype=torch.int64)
    return Translator(hidden, layers, heads, vocabulary), (ids, ids.clone(), ids.clone())


def small():
    return made(32, 2, 4, 8, 16, vocabulary=64)


def big():
    """The larger one of the paper, on a batch of 256."""
    return made(1024, 6, 16, 256, 256)


def large():
    """2.9 billion parameters, on a batch of 256."""
    return made(2048, 24, 32, 256, 512)
