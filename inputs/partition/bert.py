"""BERT (J. Devlin et al., arXiv:1810.04805), of any size, with both of its losses: for masked
tokens, whose head has the table of the embedding, and for whether two sentences follow each
other."""

import torch
from torch import nn
from torch.nn import functional


class Layer(nn.Module):
    def __init__(self, hidden, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x):
        rows, tokens, hidden = x.shape
        split = self.qkv(x).view(rows, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        mixed = self.out(mixed.transpose(1, 2).reshape(rows, tokens, hidden))
        x = self.norm1(x + functional.dropout(mixed, self.dropout, self.training))
        wide = self.down(functional.gelu(self.up(x)))
        return self.norm2(x + functional.dropout(wide, self.dropout, self.training))


class Bert(nn.Module):
    def __init__(self, hidden, layers, heads, sequence, vocabulary=30_522, dropout=0.1):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions, self.types = nn.Embedding(sequence, hidden), nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, dropout) for _ in range(layers))
        self.dense, self.head_norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary)
        self.head.weight = self.tokens.weight
        self.pooler, self.following = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)

    def forward(self, ids, types, labels, follows):
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.tokens(ids) + self.positions(places) + self.types(types))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.head_norm(functional.gelu(self.dense(x))))
        masked = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        first = self.following(torch.tanh(self.pooler(x[:, 0])))
        return masked + functional.cross_entropy(first, follows)


def made(hidden, layers, heads, batch, sequence, **sizes):
    """The model; token ids, their sentences and labels [batch, sequence], and follows [batch]."""
    ids, follows = (
        torch.zeros(*shape, dtype=torch.int64) for shape in ((batch, sequence), (batch,))
    )
    return Bert(hidden, layers, heads, sequence, **sizes), (ids, ids.clone(), ids.clone(), follows)


def small():
    return made(32, 4, 4, 8, 16, vocabulary=64)


def large():
    """BERT-large: 336 million parameters."""
    return made(1024, 24, 16, 256, 512)


def hidden_2048_layers_96():
    """4.9 billion parameters, on a batch of 256."""
    return enlarged(2048, 96)


def enlarged(hidden, layers, batch=256):
    """BERT of any width and depth, with heads of 64; arXiv:2103.16063 has hidden 1024, 1536 and
    2048, and 24 to 256 layers."""
    return made(hidden, layers, hidden // 64, batch, 512)
