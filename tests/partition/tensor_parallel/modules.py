"""Modules whose linear layers are split over ranks."""

import pytest
import torch
from torch import nn
from torch.nn import functional

HERE = "tests.partition.tensor_parallel.modules"


class Mlp(nn.Module):
    """Blocks of two linear layers, and an odd layer at the end."""

    def __init__(self, blocks=2, width=8):
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(blocks))
        self.down = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(blocks))
        self.last = nn.Linear(width, 1)

    def forward(self, x, y):
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(functional.gelu(up(x)))
        return functional.mse_loss(self.last(x), y)


def mlp(blocks=2, batch=12):
    x = torch.sin(torch.arange(batch * 8, dtype=torch.float64)).reshape(batch, 8)
    return Mlp(blocks), (x, x[:, :1].cos())


class Block(nn.Module):
    """Transformer block with a fused projection, normalization and dropout."""

    def __init__(self, width, heads, rate):
        super().__init__()
        self.heads, self.rate = heads, rate
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x):
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in self.qkv(self.norms[0](x)).split(x.shape[-1], -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = functional.dropout(functional.gelu(self.up(self.norms[1](x))), self.rate)
        return x + functional.dropout(self.down(y), self.rate)


class Transformer(nn.Module):
    """Language model; the head is `tied` to the token table or not."""

    def __init__(self, layers, rate, tied, width=8, *, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width, 0), nn.Embedding(5, width)
        self.blocks = nn.ModuleList(Block(width, 4, rate) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids, labels):
        x = self.tokens(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def transformer(layers=2, rate=0.0, tied=False, batch=8, vocabulary=24):
    ids = torch.arange(batch * 5).reshape(batch, 5) * 7 % 24
    return Transformer(layers, rate, tied, vocabulary=vocabulary), (ids, (ids + 3) % 24)


def dropping_transformer():
    return transformer(layers=1, rate=0.25)


class Encoder(nn.Module):
    def __init__(self, rate):
        super().__init__()
        how = {"dropout": rate, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 4, 16, **how) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def encoder(rate=0.0):
    return Encoder(rate), (torch.sin(torch.arange(96, dtype=torch.float64)).reshape(4, 3, 8),)


def dropping_encoder():
    return encoder(0.25)


class Special(nn.Module):
    """Two linear layers with values that depend on weights through complex numbers or in-place
    writes, or with a product for each head."""

    def __init__(self, kind, width=8):
        super().__init__()
        self.kind, self.first, self.norm = kind, nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        if kind == "matrix":
            self.inner = nn.Linear(width, width)

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.kind == "complex":
            y = self.up(torch.fft.fft(x).real)
        elif self.kind == "vector":
            heads = self.up(x).unflatten(-1, (1, 4, 4)).transpose(1, 2)
            y = (heads @ self.norm.weight[:4]).transpose(1, 2).repeat_interleave(4, -1)
        elif self.kind == "matrix":
            heads = self.up(x).unflatten(-1, (2, 8)).tanh()
            y = self.inner(self.inner(heads).tanh()).flatten(1)
        else:
            scale = torch.zeros(x.shape[0], 1, dtype=x.dtype)
            scale[:, :] = x[:, :1]
            y = self.up(x.detach()) * scale
        return self.down(functional.gelu(y)).square().mean()


def special(kind):
    return Special(kind), (torch.sin(torch.arange(64, dtype=torch.float64)).reshape(8, 8),)


def _language_model(kind, **sizes):
    """Model of transformers; see `tests/peers` for more of them."""
    transformers = pytest.importorskip("transformers")
    sizes |= {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    config = transformers.AutoConfig.for_model(kind, **sizes)
    ids = torch.arange(24).reshape(4, 6) * 7 % 64
    return transformers.AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


def gpt2():
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _language_model("gpt2", n_layer=2, n_embd=8, n_head=4, n_positions=8, **rates)


def llama(key_heads):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": key_heads}
    return _language_model("llama", max_position_embeddings=8, **sizes, **heads)


def in_double():
    module, inputs = transformer(tied=True)
    return module.double(), inputs
