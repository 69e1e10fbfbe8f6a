"""Quantized saved activations: results compared with a torch model that rounds them, bytes, and
memory peaks."""

import pkgutil
from functools import partial
from importlib import import_module
from typing import NamedTuple, get_type_hints

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16")
import numpy as np
import pytest
import torch

import hpc3d.model
from hpc3d.arrays.array import Array, SavedActivation
from hpc3d.comm.threads import run
from hpc3d.model.families import GPT2
from hpc3d.model.kept import KeptForm, OffloadedArray, RoundedArray
from hpc3d.model.microbatch import microbatches
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.model.stage import LAYER, build
from hpc3d.predict.simulation.count import every_rank
from hpc3d.tensor.matmul import Saved
from hpc3d.tensor.split import Split
from tests.pipeline.mixes import config_of, trainer_of
from tests.predict.simulation.test_count import counted
from tests.strided import strided

B, T, H, HEADS = 3, 4, 24, 12
ROWS = B * T
SIZES = ModelSizes(layers=1, hidden=H, heads=HEADS, sequence=T, vocabulary=29)


def in_bfloat16(x):
    return x.bfloat16().double()


def in_int8(x):
    scale = (x.abs().amax(-1, keepdim=True) / 127).float().double()
    return torch.round(x / scale) * scale


def in_float8(x):
    scale = (x.abs().amax(-1, keepdim=True) / 448).float().double()
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


ROUNDED = {"bfloat16": in_bfloat16, "int8": in_int8, "float8": in_float8}


def functions(rounded):
    """Return the layers of a block as torch functions that save rounded activations."""

    class Linear(torch.autograd.Function):
        @staticmethod
        def forward(kept, x, w, b):
            kept.save_for_backward(rounded(x), w)
            return x @ w + b

        @staticmethod
        def backward(kept, dy):
            x, w = kept.saved_tensors
            return dy @ w.T, x.T @ dy, dy.sum(0)

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(kept, x, gamma, beta):
            rstd = (x.var(1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
            n = (x - x.mean(1, keepdim=True)) * rstd
            kept.save_for_backward(rounded(n), rstd, gamma)
            return n * gamma + beta

        @staticmethod
        def backward(kept, dy):
            n, rstd, gamma = kept.saved_tensors
            dn = dy * gamma
            mean, along = dn.mean(1, keepdim=True), (dn * n).mean(1, keepdim=True)
            return (dn - mean - n * along) * rstd, (dy * n).sum(0), dy.sum(0)

    class Gelu(torch.autograd.Function):
        @staticmethod
        def forward(kept, h):
            with torch.enable_grad():
                x = h.detach().requires_grad_()
                y = torch.nn.functional.gelu(x, approximate="tanh")
                (slopes,) = torch.autograd.grad(y.sum(), x)
            kept.save_for_backward(rounded(slopes))
            return y.detach()

        @staticmethod
        def backward(kept, dy):
            return dy * kept.saved_tensors[0]

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(kept, qkv):
            q, k, v = heads_of(qkv)
            mask = torch.full((T, T), -torch.inf, dtype=q.dtype).triu(1)
            p = torch.softmax(q @ k.mT / (H // HEADS) ** 0.5 + mask, -1)
            kept.save_for_backward(rounded(qkv), rounded(p.mT).mT)
            return (p @ v).transpose(1, 2).reshape(ROWS, H)

        @staticmethod
        def backward(kept, dout):
            qkv, p = kept.saved_tensors
            q, k, v = heads_of(qkv)
            do = dout.view(B, T, HEADS, -1).transpose(1, 2)
            dp = do @ v.mT
            ds = p * (dp - (dp * p).sum(-1, keepdim=True)) / (H // HEADS) ** 0.5
            grads = torch.stack([ds @ k, ds.mT @ q, p.mT @ do])  # [3, B, heads, T, D]
            return grads.permute(1, 3, 2, 0, 4).reshape(ROWS, 3 * H)

    return Linear.apply, Norm.apply, Gelu.apply, Attention.apply


def heads_of(qkv):
    """Return q, k and v [B, heads, T, D] of [q|k|v], which is ordered by heads."""
    return qkv.view(B, T, HEADS, 3, -1).permute(3, 0, 2, 1, 4)


def in_torch(weights, x, dy, rounded):
    """Return Y, dX and the gradients of all parameters."""
    w = {name: torch.tensor(value, requires_grad=True) for name, value in weights.items()}
    linear, norm, gelu, attention = functions(rounded)

    def affine(x, name):
        return linear(x, w[f"layers.0.{name}.weight"], w[f"layers.0.{name}.bias"])

    def normed(x, name):
        return norm(x, w[f"layers.0.{name}.gamma"], w[f"layers.0.{name}.beta"])

    x = torch.tensor(x, requires_grad=True)
    y = x + affine(attention(affine(normed(x, "norm1"), "qkv")), "proj")
    y = y + affine(gelu(affine(normed(y, "norm2"), "up")), "down")
    y.backward(torch.tensor(dy))
    return y.detach(), x.grad, {name: each.grad for name, each in w.items()}


def by_hand(mesh, keep_dtype, x, dy):
    """Return the same results, and the weights."""
    spec = ModelSpec(GPT2, SIZES, {"dense": Split()}, keep_dtype=keep_dtype)
    parameters = Parameters(mesh, "float64")
    (stage,) = build(mesh, parameters, spec, [LAYER])
    parameters.allocate(5)
    rng = np.random.default_rng(2)
    parameters.value += rng.normal(scale=0.2, size=parameters.value.shape)
    tokens = np.zeros((B, T), np.int32)
    (micro,) = microbatches(0, tokens, tokens, 1)
    parameters.grad.fill(0)
    y, saved = stage.forward(x, micro)
    y, dx = y.copy(), stage.backward(dy, saved, micro)
    grads = {item.name: item.grad.copy() for item in parameters}
    return y, dx, grads, {item.name: item.value.copy() for item in parameters}


@pytest.mark.parametrize("keep_dtype", ROUNDED)
def test_quantized_activations_match_a_torch_reference(keep_dtype):
    rng = np.random.default_rng(1)
    x, dy = rng.normal(size=(2, ROWS, H))
    ((y, dx, grads, weights),) = run({}, lambda mesh: by_hand(mesh, keep_dtype, x, dy))
    wanted_y, wanted_dx, wanted = in_torch(weights, x, dy, ROUNDED[keep_dtype])
    np.testing.assert_allclose(y, wanted_y, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(dx, wanted_dx, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted[name], rtol=1e-10, atol=1e-10, err_msg=name)
    exact = in_torch(weights, x, dy, lambda kept: kept)
    assert 1e-4 < abs(exact[1] - wanted_dx).max() < 0.3


# Bytes of a layer in flight on one rank: 16 n elements and the probabilities, or X alone; rows of
# X, two norms, three other products, attention, and GELU; of the hidden layer one for both.
N, SCORES = ROWS * H, B * HEADS * T * T
FORMS = {
    ("bfloat16", "none"): 2 * (16 * N + SCORES),
    ("bfloat16", "selective"): 2 * 16 * N,
    ("bfloat16", "full"): 2 * N,
    ("int8", "none"): 16 * N + SCORES + 4 * (8 * ROWS + B * HEADS * T),
    ("int8", "selective"): 16 * N + 4 * 8 * ROWS,
    ("int8", "full"): N + 4 * ROWS,
    ("float8", "none"): 16 * N + SCORES + 4 * (8 * ROWS + B * HEADS * T),
}


@pytest.mark.parametrize(("keep_dtype", "recompute"), FORMS)
def test_bytes_of_quantized_saved_activations(keep_dtype, recompute):
    sizes = f"batch={B} sequence={T} hidden={H} heads={HEADS} keep_dtype={keep_dtype}"

    def peak(layers):
        config = config_of(f"schedule=none {sizes} recompute={recompute} layers={layers}")

        def rank(mesh):
            trainer = trainer_of(mesh, config)
            trainer.step(0)
            trainer.step(1)
            kinds = mesh.pool.live
            fixed = sum(kinds[kind] for kind in ("parameter", "gradient", "optimizer"))
            return mesh.pool.peak["all"] - fixed

        return run({}, rank)[0]

    assert peak(7) - peak(4) == 3 * FORMS[keep_dtype, recompute]


LINES = [
    "microbatches=2 keep_dtype=int8",
    "x=2 y=2 z=2 schedule=none microbatches=1 layers=2 keep_dtype=bfloat16 keep_gathered=false",
    "p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d keep_dtype=int8 recompute=[0,2] dropout=0.25",
    "c=2 schedule=none microbatches=2 sequence=4 keep_dtype=bfloat16 kind=llama ffn=48",
    "p=2 d=2 schedule=1f1b microbatches=2 zero=3 keep_dtype=int8 kind=bert recompute=selective",
    "e=2 d=2 schedule=none microbatches=2 experts=4 top_k=2 zero=2 keep_dtype=bfloat16",
    "x=2 schedule=none microbatches=2 scheme=1d keep_dtype=float8 recompute=selective",
]


@pytest.mark.parametrize("line", strided(LINES, 3))
def test_predicted_traffic_and_flops_match_the_counted_ones(line):
    config = config_of(line)
    for ours, theirs in zip(every_rank(config, 29), counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()


@pytest.mark.parametrize("line", strided(LINES, 3, 1))
def test_quantized_activations_keep_the_first_loss_exact_and_later_ones_close(line):
    def losses(line):
        config = config_of(f"{line} steps=5 dtype=float32")

        def rank(mesh):
            trainer = trainer_of(mesh, config)
            return [trainer.step(number).loss for number in range(5)]

        return run(config.sizes(), rank)[0]

    kept, exact = losses(line), losses(" ".join(w for w in line.split() if "keep_d" not in w))
    assert kept[0] == exact[0] and kept[1:] != exact[1:]
    np.testing.assert_allclose(kept, exact, rtol=0.01)


def test_shared_array_is_quantized_once_and_read_only_ones_are_kept():
    def rank(mesh):
        form = KeptForm(mesh, "float32", "int8")
        x = mesh.zeros((4, 8), "float32")
        shared = mesh.zeros((4, 8), "float32")
        shared.flags.writeable = False
        twice = Saved(x, x, ""), Saved(shared, x, "")
        first, second = (form.put_away(each) for each in twice)
        assert isinstance(first.x, RoundedArray) and first.w is x
        assert second.x is shared
        return form.take([first]).x.tolist() == x.tolist()

    assert run({}, rank) == [True]


class SquareSaved(NamedTuple):
    z: SavedActivation
    moment: Array


class Square:
    """Layer Y = X^2, which saves an activation under its own name."""

    adds_residual = False

    def forward(self, x, micro):
        return x * x, SquareSaved(x, x.sum(0))

    def backward(self, dy, saved, micro, defer):
        assert not isinstance(saved.moment, RoundedArray | OffloadedArray)
        return 2 * saved.z * dy


def test_types_of_all_saved_fields_are_known_at_run_time():
    """A type that is only imported for type checking breaks a run with offloaded activations."""
    names = [each.name for each in pkgutil.walk_packages(hpc3d.model.__path__, "hpc3d.model.")]
    found = [vars(import_module(name)).items() for name in names]
    kinds = {kind for items in found for name, kind in items if name.endswith("Saved")}
    assert len(kinds) > 8 and all(get_type_hints(kind) for kind in kinds)


@pytest.mark.parametrize("keep_dtype", [None, "int8"])
@pytest.mark.parametrize("offload", [(), ("activations",)])
def test_annotated_fields_are_quantized_or_offloaded(keep_dtype, offload):
    rng = np.random.default_rng(4)
    x, dy = rng.normal(size=(2, ROWS, H))
    tokens = np.zeros((B, T), np.int32)
    (micro,) = microbatches(0, tokens, tokens, 1)

    def rank(mesh, keep_dtype=None, offload=()):
        spec = ModelSpec(GPT2, SIZES, {"dense": Split()}, keep_dtype=keep_dtype)
        parameters = Parameters(mesh, "float64", offload=offload)
        (stage,) = build(mesh, parameters, spec, [LAYER])
        stage.blocks[0].mlp = Square()
        parameters.allocate(5)
        _, saved = stage.forward(x, micro)
        z = saved[0].mlp.z
        return z, stage.backward(dy, saved, micro)

    ((z, dx),) = run({}, partial(rank, keep_dtype=keep_dtype, offload=offload))
    if keep_dtype:
        assert isinstance(z, RoundedArray)
    assert isinstance(z.codes if keep_dtype else z, OffloadedArray) == bool(offload)
    ((_, exact),) = run({}, rank)
    np.testing.assert_allclose(dx, exact, rtol=0, atol=0.2 if keep_dtype else 0)
