"""Eager PyTorch implementation of the models, used as a reference for gradients and step times.

The weights have the same shapes, names and column order as in hpc3d.model: [q | k | v] for each
attention head, unless q, k and v have separate weights, and (gate, up) for each MLP feature. All
operations are torch functions: linear, layer_norm, rms_norm, gelu, silu,
scaled_dot_product_attention, cross_entropy. The weights determine the model family: a model with
segment embeddings is BERT, with post-norm blocks and without a causal mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import sqrt
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.swiglu import geglu

if TYPE_CHECKING:
    from hpc3d.config.input_file import TrainConfig
    from hpc3d.model.parameters import Parameters
    from hpc3d.model.spec import Family


def linear(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, weights[f"{name}.weight"].T, weights.get(f"{name}.bias"))


def norm(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, epsilon: float = 1e-5
) -> torch.Tensor:
    gamma, beta = weights[f"{name}.gamma"], weights.get(f"{name}.beta")
    if beta is None:
        return functional.rms_norm(x, gamma.shape, gamma, epsilon)
    return functional.layer_norm(x, gamma.shape, gamma, beta, epsilon)


def _projected(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any
) -> list[torch.Tensor]:
    """Return the projections q, k and v of x, each of shape [B, heads, T, D]."""
    if f"{name}.qkv.weight" in weights:
        qkv = linear(weights, f"{name}.qkv", x).unflatten(-1, (shape.heads, 3, -1))
        return [part.transpose(1, 2) for part in qkv.unbind(3)]
    parts = (linear(weights, f"{name}.{letter}", x) for letter in "qkv")
    return [part.unflatten(-1, (-1, shape.head_dim)).transpose(1, 2) for part in parts]


def _attention(
    weights: dict[str, torch.Tensor],
    name: str,
    x: torch.Tensor,
    shape: Any,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the self-attention output for x, shape [B, T, hidden].

    Without the mask `seen`, [..., query, key], attention is causal. Otherwise, each query attends
    to the keys for which `seen` is true. Groups of adjacent query heads share a KV head.
    """
    q, k, v = _projected(weights, name, x, shape)
    if f"{name}.q_norm.gamma" in weights:
        q = _normed(weights, f"{name}.q_norm", q, shape.epsilon)
        k = _normed(weights, f"{name}.k_norm", k, shape.epsilon)
    if "embedding.position" not in weights:
        q, k = (_turned(each, shape.rotation) for each in (q, k))
    g = shape.heads // shape.kv_heads
    k, v = (each.repeat_interleave(g, 1) for each in (k, v))
    if cap := shape.score_cap:
        out = _capped_attention(q, k, v, seen, cap)
    else:
        out = functional.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None)
    return out.transpose(1, 2).flatten(2)


def _capped_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor | None, cap: float
) -> torch.Tensor:
    """Return the attention output for scores with a soft cap, which torch has no function for."""
    scores = _capped(q @ k.transpose(-1, -2) / sqrt(q.shape[-1]), cap)
    if seen is None:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def _capped(x: torch.Tensor, cap: float) -> torch.Tensor:
    return cap * torch.tanh(x / cap) if cap else x


def _normed(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Normalize x, shape [B, heads, T, D], over one head or all heads, as many as gamma has."""
    features = x.transpose(1, 2).flatten(2)
    normed = norm(
        weights, name, features.unflatten(-1, (-1, len(weights[f"{name}.gamma"]))), epsilon
    )
    return normed.flatten(2).unflatten(-1, (-1, x.shape[-1])).transpose(1, 2)


def causal_mask(shape: Any, layer: int, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the attention mask of block `layer`, or `None` if all earlier tokens are visible."""
    window, starts = shape.window_of(layer), _document_starts(shape, tokens)
    if not window and starts is None:
        return None
    positions = torch.arange(tokens.shape[1])
    back = positions[:, None] - positions
    seen = (back >= 0) & (back < (window or tokens.shape[1]))
    return seen if starts is None else seen & (positions >= starts[:, :, None])[:, None]


def _document_starts(shape: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """Return the beginning [B, T] of each token's document, or `None` without documents."""
    if shape.separator is None:
        return None
    ends = (tokens == shape.separator).roll(1, 1)
    return (torch.arange(tokens.shape[1]) * ends).cummax(1).values


def embedded(weights: dict[str, torch.Tensor], shape: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the token embeddings plus, if the model has them, the position embeddings."""
    x, table = weights["embedding.token"][tokens], weights.get("embedding.position")
    if table is None:
        return x
    positions = torch.arange(tokens.shape[1])
    starts = _document_starts(shape, tokens)
    return x + table[positions if starts is None else positions - starts]


def _turned(x: torch.Tensor, rotation: Any) -> torch.Tensor:
    """Apply rotary embeddings to x, shape [..., T, D], with complex arithmetic.

    Of r rotated features, those with indices i and i + r / 2 are the real part and the imaginary
    part of a complex number. A rotation multiplies this number by a exp(1j * angle), where a is
    the amplitude.
    """
    sequence, width = x.shape[-2:]
    frequencies = torch.tensor(rotation.frequencies(width), dtype=x.dtype)
    angles = torch.outer(torch.arange(sequence, dtype=x.dtype), frequencies)
    a, b, rest = x.split([len(frequencies), len(frequencies), width - 2 * len(frequencies)], -1)
    turned = torch.complex(a, b)
    turned = turned * torch.polar(torch.full_like(angles, rotation.amplitude), angles)
    return torch.cat([turned.real, turned.imag, rest], -1)


def _block(
    weights: dict[str, torch.Tensor],
    name: str,
    x: torch.Tensor,
    shape: Any,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    n = _norm_if_any(weights, f"{name}.norm1", x, shape)
    a = linear(weights, f"{name}.proj", _attention(weights, name, n, shape, seen))
    before, x = x, x + _norm_if_any(weights, f"{name}.post_norm1", a, shape)
    parallel = getattr(shape, "parallel", False)
    n = _norm_if_any(weights, f"{name}.norm2", before if parallel else x, shape)
    y = linear(weights, f"{name}.down", _hidden(weights, name, n, shape))
    return x + _norm_if_any(weights, f"{name}.post_norm2", y, shape)


def _norm_if_any(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any
) -> torch.Tensor:
    """Return norm(x), or x if the model has no norm of this name."""
    return norm(weights, name, x, shape.epsilon) if f"{name}.gamma" in weights else x


def _last_norm_block(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any, seen: torch.Tensor
) -> torch.Tensor:
    """Return the output of a BERT block with post-norm: LayerNorm after each residual addition."""
    a = linear(weights, f"{name}.proj", _attention(weights, name, x, shape, seen))
    x = norm(weights, f"{name}.norm1", x + a, shape.epsilon)
    h = linear(weights, f"{name}.down", _hidden(weights, name, x, shape))
    return norm(weights, f"{name}.norm2", x + h, shape.epsilon)


def _hidden(
    weights: dict[str, torch.Tensor], name: str, x: torch.Tensor, shape: Any
) -> torch.Tensor:
    h = linear(weights, f"{name}.up", x)
    if h.shape[-1] == 2 * shape.ffn:
        gate = getattr(shape, "gate", functional.silu)
        return gate(h[..., ::2]) * h[..., 1::2]
    return _gelu(h, shape)


def _gelu(h: torch.Tensor, shape: Any) -> torch.Tensor:
    return functional.gelu(h, approximate="tanh" if shape.gelu == "tanh" else "none")


def loss(
    weights: dict[str, torch.Tensor],
    shape: Any,
    tokens: torch.Tensor,
    targets: torch.Tensor,
    family: Family | None = None,
) -> torch.Tensor:
    """Return the mean cross-entropy loss for tokens and targets of shape [B, T].

    `weights` is a dict from hpc3d's parameter names to tensors. The argument `family` is required
    for a model with a scaled embedding, norms with an offset, GeGLU or parallel branches.
    """
    if family:
        weights, shape = _in_plain_form(weights, shape, family)
    if "embedding.segment" in weights:
        logits = _masked_logits(weights, shape, tokens)
    else:
        logits = _logits(weights, shape, tokens)
    return functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten().long(), ignore_index=IGNORE
    )


def _in_plain_form(
    weights: dict[str, torch.Tensor], shape: Any, family: Family
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return weights and sizes of a model without scaled embedding and offsets of norms."""
    offset, table = 1 - family.norm.INITIAL, weights["embedding.token"]
    plain = {
        name: each + offset if name.endswith(".gamma") else each for name, each in weights.items()
    }
    if family.scales_embedding:
        plain["embedding.token"] = table * sqrt(shape.hidden)
    plain.setdefault("head.table", table)
    tanh = partial(functional.gelu, approximate="tanh")
    gate = tanh if family.gate is geglu else functional.silu
    how = {"tied": False, "gate": gate, "parallel": family.parallel}
    how |= {"window_of": shape.window_of, "rotation_of": shape.rotation_of}
    return plain, SimpleNamespace(**{**vars(shape), **how})


def _logits(weights: dict[str, torch.Tensor], shape: Any, tokens: torch.Tensor) -> torch.Tensor:
    table = weights["embedding.token"]
    x = embedded(weights, shape, tokens)
    for number in range(shape.layers):
        seen = causal_mask(shape, number, tokens)
        of_layer = {**vars(shape), "rotation": shape.rotation_of(number)}
        x = _block(weights, f"layers.{number}", x, SimpleNamespace(**of_layer), seen)
    head = table if shape.tied else weights["head.table"]
    logits = norm(weights, "head.norm", x, shape.epsilon) @ head[: shape.vocabulary].T
    return _capped(logits, shape.logit_cap)


def _masked_logits(
    weights: dict[str, torch.Tensor], shape: Any, tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logits of BERT. All tokens are in segment 0, and padding tokens are masked."""
    table, positions = weights["embedding.token"], weights["embedding.position"]
    x = table[tokens] + positions[-tokens.shape[1] :] + weights["embedding.segment"][0]
    x = norm(weights, "embedding.norm", x, shape.epsilon)
    seen = torch.ones_like(tokens, dtype=torch.bool)
    if shape.padding is not None:
        seen = tokens != shape.padding
    seen = seen[:, None, None, :]
    for number in range(shape.layers):
        x = _last_norm_block(weights, f"layers.{number}", x, shape, seen)
    h = _gelu(linear(weights, "head.dense", x), shape)
    head = table if shape.tied else weights["head.table"]
    logits = norm(weights, "head.norm", h, shape.epsilon) @ head.T + weights["head.bias"]
    return logits[..., : shape.vocabulary]


def weights_of(parameters: Parameters) -> dict[str, torch.Tensor]:
    """Copy the weights of a serial hpc3d model to torch leaf tensors that require gradients."""
    return {item.name: torch.tensor(item.value, requires_grad=True) for item in parameters}


def training_step(
    parameters: Parameters, shape: Any, train: TrainConfig, tokens: np.ndarray, targets: np.ndarray
) -> Callable[[], None]:
    """Return a function that trains a torch copy of a serial model for one step on one thread."""
    torch.set_num_threads(1)
    weights = weights_of(parameters)
    optimizer = torch.optim.AdamW(weights.values(), lr=train.learning_rate)
    tokens, targets = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()

    def step():
        optimizer.zero_grad()
        loss(weights, shape, tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), train.clip)
        optimizer.step()

    return step
