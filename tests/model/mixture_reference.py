"""Mixtures of experts in plain torch: slots are assigned token by token, all experts process all
tokens, and autograd computes the gradients."""

from math import ceil

import torch
from torch.nn import functional

from hpc3d.benchmarks import torch_reference
from hpc3d.ops.cross_entropy import IGNORE


def mixture(weights, name, x, shape):
    """Return (y, router losses) of x [B, T, h]. The balancing bias has the excess of the expert
    choices as its gradient, and adds nothing to the losses."""
    form = shape.experts
    tokens = x.shape[1]
    logits = x @ weights[f"{name}.router.weight"]
    probs = logits.softmax(-1)
    bias = weights.get(f"{name}.router.bias", torch.zeros(form.count))
    choices = (
        (probs + bias).detach().argsort(dim=-1, descending=True, stable=True)[..., : form.top_k]
    )
    gates = probs.gather(-1, choices)
    if form.top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    room = ceil(round(form.top_k * tokens * form.capacity / form.count, 9))
    room = min(room, tokens) if form.capacity else tokens
    kept = torch.tensor(with_a_slot(choices.tolist(), form.count, room))  # [B, T, k]
    gate = torch.zeros_like(probs).scatter(-1, choices, gates * kept)  # [B, T, E]
    experts = range(form.count)
    out = [_expert(weights, f"{name}.experts", x, number, shape) for number in experts]
    y = (gate[..., None] * torch.stack(out, 2)).sum(2)
    if form.shared:
        y = y + torch_reference.linear(
            weights, f"{name}.shared.down", _hidden(weights, f"{name}.shared.up", x, shape)
        )
    chosen = functional.one_hot(choices, form.count).double()  # [B, T, k, E]
    share = chosen.sum(2).mean(1) / form.top_k
    balance = form.count * (share * probs.mean(1)).sum(-1)  # [B]
    z = logits.logsumexp(-1).square()  # [B, T]
    excess = chosen.sum((0, 1, 2)) - choices.numel() / form.count
    balancing = ((bias - bias.detach()) * excess).sum()
    return y, form.balance_loss * tokens * balance.sum() + form.z_loss * z.sum() + balancing


def with_a_slot(choices, count, room):
    """Return, for each choice [B][T][k], if it gets one of the `room` slots of its expert."""
    kept = [[[False] * len(sequence[0]) for _ in sequence] for sequence in choices]
    for here, sequence in zip(kept, choices, strict=True):
        left = [room] * count
        for number in range(len(sequence[0])):
            for token, chosen in enumerate(sequence):
                here[token][number] = left[chosen[number]] > 0
                left[chosen[number]] -= 1
    return kept


def _expert(weights, name, x, number, shape):
    def linear(part, x):
        y = x @ weights[f"{name}.{part}.weight"][:, number]
        bias = weights.get(f"{name}.{part}.bias")
        return y if bias is None else y + bias[0, number]

    return linear("down", _activated(linear("up", x), shape))


def _hidden(weights, name, x, shape):
    return _activated(torch_reference.linear(weights, name, x), shape, shape.experts.shared)


def _activated(h, shape, times=1):
    if h.shape[-1] == 2 * times * shape.ffn:
        return functional.silu(h[..., ::2]) * h[..., 1::2]
    return functional.gelu(h, approximate="tanh" if shape.gelu == "tanh" else "none")


def loss(weights, shape, tokens, targets):
    """Return the mean loss of tokens and targets [B, T], including the router losses."""
    table = weights["embedding.token"]
    x = torch_reference.embedded(weights, shape, tokens)
    routers = 0.0
    for number in range(shape.layers):
        name = f"layers.{number}"
        n = torch_reference.norm(weights, f"{name}.norm1", x, shape.epsilon)
        seen = torch_reference.causal_mask(shape, number, tokens)
        a = torch_reference._attention(weights, name, n, shape, seen)
        x = x + torch_reference.linear(weights, f"{name}.proj", a)
        n = torch_reference.norm(weights, f"{name}.norm2", x, shape.epsilon)
        if shape.mixes(number):
            y, router = mixture(weights, name, n, shape)
            routers = routers + router
        else:
            h = torch_reference._hidden(weights, name, n, shape)
            y = torch_reference.linear(weights, f"{name}.down", h)
        x = x + y
    head = table if shape.tied else weights["head.table"]
    logits = torch_reference.norm(weights, "head.norm", x, shape.epsilon)
    logits = logits @ head[: shape.vocabulary].T
    valid = (targets != IGNORE).sum().clamp(min=1)
    entropy = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORE, reduction="sum"
    )
    return (entropy + routers) / valid
