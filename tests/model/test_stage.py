"""The manual forward and backward passes, compared with torch autograd in float64."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from hpc3d.benchmarks import torch_reference
from hpc3d.comm.threads import run
from hpc3d.config.input_file import TrainConfig
from hpc3d.model.families import (
    BERT,
    GEMMA,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    LLAMA,
    OLMO2,
    QWEN2,
    QWEN3,
    ROBERTA,
)
from hpc3d.model.spec import ModelSizes
from hpc3d.ops.cross_entropy import IGNORE
from hpc3d.ops.random import keep_mask, philox_key
from hpc3d.ops.rotary import Rotation
from hpc3d.tensor.split import Split
from hpc3d.training.optimizers.optimizer import AdamW
from tests.model.whole import Model

SEED, STEP = 5, 2
SHAPE = {"layers": 3, "hidden": 24, "heads": 4, "sequence": 7, "vocabulary": 29}


def batch(shape, sequences=5, seed=3):
    tokens = np.random.default_rng(seed).integers(
        0, shape.vocabulary, (2, sequences, shape.sequence)
    )
    tokens[1, 0, :3] = IGNORE
    return tokens


def serial(shape, family=GPT2):
    return run({}, lambda mesh: Model(mesh, shape, Split(), seed=SEED, family=family))[0]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_gpt2_loss_and_gradients_match_torch(tied, gelu):
    shape = ModelSizes(**SHAPE, tied=tied, gelu=gelu, std=0.3)
    same_as(torch_reference.loss, shape)


LLAMA_3 = Rotation(500.0, factor=4.0, low=1.0, high=3.0, original=6)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rotation", [Rotation(100.0), LLAMA_3])
def test_llama_matches_torch(kv_heads, rotation):
    how = {"kv_heads": kv_heads, "ffn": 40, "epsilon": 1e-6, "rotation": rotation}
    same_as(torch_reference.loss, ModelSizes(**SHAPE | how, tied=False, std=0.3), LLAMA)


YARN = Rotation(500.0, factor=4.0, original=2, type="yarn", fast=0.5, slow=0.1, share=0.5)


@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("head_dim", [4, 12])
def test_llama_with_biases_and_a_head_dimension_matches_torch(kv_heads, head_dim):
    how = {"kv_heads": kv_heads, "head_dim": head_dim, "ffn": 40, "rotation": YARN}
    family = replace(LLAMA, biased=GPT2.biased)
    same_as(torch_reference.loss, ModelSizes(**SHAPE | how, tied=False, std=0.3), family)


@pytest.mark.parametrize(("family", "window"), [(GPT2, 1), (GPT2, 3), (LLAMA, 3)])
def test_every_second_block_with_a_window_matches_torch(family, window):
    how = {"ffn": 40} if family is LLAMA else {}
    shape = ModelSizes(**SHAPE | how, std=0.3, window=window, global_every=2)
    assert [shape.window_of(layer) for layer in range(3)] == [window, 0, window]
    same_as(torch_reference.loss, shape, family)


def loss_of_documents(weights, shape, tokens, targets):
    """Run the model on one document at a time; a document ends with the token `separator`."""
    logits = []
    for row in tokens:
        ends = [number + 1 for number, token in enumerate(row) if token == shape.separator]
        for first, stop in pairwise(sorted({0, *ends, len(row)})):
            alone = replace(shape, sequence=stop - first, separator=None)
            logits.append(torch_reference._logits(weights, alone, row[None, first:stop])[0])
    return functional.cross_entropy(
        torch.cat(logits), targets.flatten().long(), ignore_index=IGNORE
    )


@pytest.mark.parametrize(("family", "window"), [(GPT2, 0), (LLAMA, 0), (GPT2, 2)])
def test_packed_documents_match_a_run_on_each_document(family, window):
    """Tokens 0 to 4 of 5 possible tokens: sequences of 7 tokens with documents of 1 to 7."""
    how = {"vocabulary": 5, "separator": 3, "window": window, "std": 0.3}
    shape = ModelSizes(**SHAPE | how)
    ends = np.flatnonzero(batch(shape)[0] == 3)
    assert len(ends) > 5 and (np.diff(ends) == 1).any()
    same_as(loss_of_documents, shape, family)
    same_as(torch_reference.loss, shape, family)


def test_qwen2_matches_torch():
    how = {"kv_heads": 2, "ffn": 40, "epsilon": 1e-6}
    shape = ModelSizes(**SHAPE | how, tied=False, std=0.3)
    same_as(torch_reference.loss, shape, QWEN2)
    biases = [name for name in names_of(shape, QWEN2) if name.endswith("bias")]
    assert sorted(biases) == [f"layers.{n}.{part}.bias" for n in range(3) for part in "kqv"]


@pytest.mark.parametrize("family", [QWEN3, OLMO2], ids=["qwen3", "olmo2"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_models_with_norms_of_queries_and_keys_match_torch(family, kv_heads):
    how = {"kv_heads": kv_heads, "head_dim": 8, "ffn": 40}
    same_as(torch_reference.loss, ModelSizes(**SHAPE | how, tied=False, std=0.3), family)


@pytest.mark.parametrize("tied", [True, False])
def test_gemma_matches_torch(tied):
    how = {"kv_heads": 2, "head_dim": 8, "ffn": 40}
    loss_of = partial(torch_reference.loss, family=GEMMA)
    same_as(loss_of, ModelSizes(**SHAPE | how, tied=tied, std=0.3), GEMMA)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("caps", [{"score_cap": 0.7}, {"logit_cap": 1.5}], ids=str)
def test_gemma2_matches_torch(window, caps):
    how = {"kv_heads": 2, "head_dim": 8, "ffn": 40, "window": window, "global_every": 2}
    shape = ModelSizes(**SHAPE | how | caps, std=0.3)
    same_as(partial(torch_reference.loss, family=GEMMA2), shape, GEMMA2)


@pytest.mark.parametrize("window", [0, 3, SHAPE["sequence"]])
def test_gemma3_matches_torch(window):
    """A window of the complete sequence has only the rotary embedding of a windowed block."""
    how = {"kv_heads": 2, "head_dim": 8, "ffn": 40, "window": window, "global_every": 2}
    how |= {"rotation": YARN._replace(gain=1.3), "window_rotation": Rotation(20.0, gain=0.7)}
    shape = ModelSizes(**SHAPE | how, std=0.3)
    rotations = [shape.rotation_of(layer) for layer in range(3)]
    assert (rotations[0] != rotations[1]) == (window > 0)
    same_as(partial(torch_reference.loss, family=GEMMA3), shape, GEMMA3)


@pytest.mark.parametrize("gelu", ["tanh", "exact"])
def test_gpt_neox_matches_torch(gelu):
    shape = ModelSizes(**SHAPE, tied=False, std=0.3, gelu=gelu, rotation=YARN)
    same_as(partial(torch_reference.loss, family=GPT_NEOX), shape, GPT_NEOX)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [None, 3])
def test_bert_matches_torch(tied, padding):
    how = {"epsilon": 1e-12, "ffn": 40, "gelu": "exact", "padding": padding}
    shape = ModelSizes(**SHAPE | how, tied=tied, std=0.3)
    same_as(torch_reference.loss, shape, BERT)


def test_roberta_matches_torch():
    shape = ModelSizes(**SHAPE, epsilon=1e-12, gelu="exact", padding=3, std=0.3)
    same_as(torch_reference.loss, shape, ROBERTA)
    (positions,) = (each for each in serial(shape, ROBERTA).parameters if "position" in each.name)
    assert positions.shape == (2 + shape.sequence, shape.hidden)


def names_of(shape, family):
    return [item.name for item in serial(shape, family).parameters]


def same_as(loss_of, shape, family=GPT2):
    """Compare loss and gradients with those of `loss_of`(weights, shape, tokens, targets)."""
    model = serial(shape, family)
    tokens, targets = batch(shape)
    loss = model.gradients(tokens, targets, step=STEP)
    weights = torch_reference.weights_of(model.parameters)
    expected = loss_of(weights, shape, torch.tensor(tokens), torch.tensor(targets))
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for item in model.parameters:
        gradient = weights[item.name].grad.numpy()
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(
            item.grad, gradient, atol=1e-10 * scale, rtol=0, err_msg=item.name
        )


class Dropped:
    """GPT-2 with dropout in the published positions: after the embeddings, on the attention
    probabilities, and at the end of both branches of a block; the random numbers are hpc3d's."""

    causal = True

    def __init__(self, rate):
        self.rate = rate

    def drop(self, x, name):
        """Apply dropout to x [B, ...], one sample per row of draws, scaled by 1 / (1 - p)."""
        rows, width = len(x), x[0].numel()
        kept = keep_mask(
            philox_key((SEED, name, STEP)), self.rate, slice(0, rows), slice(0, width), width
        )
        return torch.where(torch.tensor(kept).view(x.shape), x / (1 - self.rate), 0.0)

    def attention(self, qkv, heads, name):
        batch, sequence, columns = qkv.shape
        q, k, v = qkv.view(batch, sequence, heads, 3, -1).permute(3, 0, 2, 1, 4)
        scores = q @ k.transpose(-1, -2) / (columns / 3 / heads) ** 0.5
        future = torch.ones(sequence, sequence, dtype=bool).triu(1) & self.causal
        p = scores.masked_fill(future, -torch.inf).softmax(-1)
        p = self.drop(p.transpose(-1, -2), name).transpose(-1, -2)  # draws are [key, query]
        return (p @ v).transpose(1, 2).reshape(batch, sequence, columns // 3)

    def block(self, weights, name, x, heads):
        qkv = torch_reference.linear(
            weights, f"{name}.qkv", torch_reference.norm(weights, f"{name}.norm1", x)
        )
        y = torch_reference.linear(
            weights, f"{name}.proj", self.attention(qkv, heads, f"{name}.drop_p")
        )
        x = x + self.drop(y, f"{name}.drop1")
        h = torch_reference.linear(
            weights, f"{name}.up", torch_reference.norm(weights, f"{name}.norm2", x)
        )
        y = torch_reference.linear(weights, f"{name}.down", functional.gelu(h, approximate="tanh"))
        return x + self.drop(y, f"{name}.drop2")

    def loss(self, weights, shape, tokens, targets):
        table = weights["embedding.token"]
        x = self.drop(table[tokens] + weights["embedding.position"], "embedding.drop")
        for number in range(shape.layers):
            x = self.block(weights, f"layers.{number}", x, shape.heads)
        logits = torch_reference.norm(weights, "head.norm", x) @ table[: shape.vocabulary].T
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class DroppedBert(Dropped):
    """BERT with dropout in the published positions: after the norm of the embeddings, on attention
    probabilities, and before the residual of both branches of a block."""

    causal = False

    def block(self, weights, name, x, heads):
        def linear(part, x):
            return torch_reference.linear(weights, f"{name}.{part}", x)

        def norm(part, x):
            return torch_reference.norm(weights, f"{name}.{part}", x)

        y = linear("proj", self.attention(linear("qkv", x), heads, f"{name}.drop_p"))
        x = norm("norm1", x + self.drop(y, f"{name}.drop1"))
        y = linear("down", functional.gelu(linear("up", x), approximate="tanh"))
        return norm("norm2", x + self.drop(y, f"{name}.drop2"))

    def loss(self, weights, shape, tokens, targets):
        table, segments = weights["embedding.token"], weights["embedding.segment"]
        x = table[tokens] + weights["embedding.position"] + segments[0]
        x = self.drop(torch_reference.norm(weights, "embedding.norm", x), "embedding.drop")
        for number in range(shape.layers):
            x = self.block(weights, f"layers.{number}", x, shape.heads)
        h = functional.gelu(torch_reference.linear(weights, "head.dense", x), approximate="tanh")
        logits = torch_reference.norm(weights, "head.norm", h) @ table.T + weights["head.bias"]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_bert_dropout_positions_match_torch():
    same_as(DroppedBert(0.25).loss, ModelSizes(**SHAPE, std=0.3, dropout=0.25), BERT)


def test_gpt_2_dropout_positions_match_torch():
    same_as(Dropped(0.25).loss, ModelSizes(**SHAPE, std=0.3, dropout=0.25))


def test_five_adamw_steps_match_torch():
    shape = ModelSizes(**SHAPE, std=0.3)
    model = serial(shape)
    weights = torch_reference.weights_of(model.parameters)
    decayed = [weights[item.name] for item in model.parameters if item.decay]
    others = [weights[item.name] for item in model.parameters if not item.decay]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    ours = AdamW(model.parameters, 0.1, **TrainConfig().constants())
    for step in range(5):
        tokens, targets = batch(shape, seed=step)
        model.gradients(tokens, targets)
        ours.update(3e-3, 1.0)
        reference.zero_grad()
        torch_reference.loss(
            weights, shape, torch.tensor(tokens), torch.tensor(targets)
        ).backward()
        reference.step()
    # The gradient of a key's bias is 0; Adam divides its rounding by eps = 1e-8.
    for item in model.parameters:
        np.testing.assert_allclose(item.value, weights[item.name].detach(), atol=1e-10)
