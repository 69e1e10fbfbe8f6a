"""A fast GPT-2 in torch, which the steps of hpc3d are compared with.

Its arithmetic is that of hpc3d: weights, activations and logits in 16 bits, float32 master weights
updated by AdamW, gradient clipping by norm, and a tied, padded token table.
"""

import torch
from torch import nn
from torch.nn import functional

BETAS, EPSILON = (0.9, 0.95), 1e-8


class Block(nn.Module):
    """Transformer block: x + proj(attention(qkv(norm(x)))), then x + down(gelu(up(norm(x))))."""

    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        x = x + self.proj(self.attention(self.qkv(self.norm1(x))))
        h = functional.gelu(self.up(self.norm2(x)), approximate="tanh")
        return x + self.down(h)

    def attention(self, qkv):
        batch, sequence, columns = qkv.shape
        shape = batch, sequence, self.heads, columns // (3 * self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(batch, sequence, columns // 3)


class Gpt2(nn.Module):
    """GPT-2 that returns the mean loss of tokens and targets [B, T]."""

    def __init__(self, layers, hidden, heads, sequence, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.apply(start)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(x, targets)

    def head(self, x, targets):
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def compile_parts(self):
        """Compile one block, which all layers use, and the head, because compiling a deep model as
        one graph takes minutes."""
        for block in self.blocks:
            block.compile()
        self.head = torch.compile(self.head)
        return self


def start(module):
    """Initialize weights with standard deviation 0.02, and biases with 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


COMPILED = {"": lambda model: model, "whole": torch.compile, "parts": Gpt2.compile_parts}


class Peer:
    """Training of a Gpt2 on one device, eager or compiled."""

    def __init__(self, where, dtype, train, sizes, compiled=""):
        torch.manual_seed(1)
        self.where, self.clip = where, train.clip
        with torch.device(where):
            self.model = Gpt2(*sizes).to(dtype)
        self.loss = COMPILED[compiled](self.model)
        self.weights = list(self.model.parameters())
        self.masters = [w.detach().float().clone() for w in self.weights]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        groups = [
            {"params": [m for m in self.masters if m.dim() == dim], "weight_decay": decay}
            for dim, decay in ((2, train.weight_decay), (1, 0.0))
        ]
        how = {"betas": BETAS, "eps": EPSILON, "fused": where == "cuda"}
        self.optimizer = torch.optim.AdamW(groups, lr=train.learning_rate, **how)

    def step(self, batch):
        """Run one step with host tokens and targets; return its loss."""
        tokens, targets = (torch.from_numpy(each).to(self.where).long() for each in batch)
        loss = self.loss(tokens, targets)
        loss.backward()
        grads = [master.grad for master in self.masters]
        torch._foreach_copy_(grads, [weight.grad for weight in self.weights])
        nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.weights, self.masters)
        self.model.zero_grad(set_to_none=True)
        return loss.item()
