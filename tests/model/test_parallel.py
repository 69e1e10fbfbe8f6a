"""The whole model on every scheme and mesh, compared with the serial model in float64."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
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
from hpc3d.tensor.split import Split
from tests.model.whole import Model
from tests.mpi import checked
from tests.strided import strided
from tests.tensor.cases import SPLITS, distinct, sizes

SEQUENCES = 48
SHAPE = {"layers": 2, "hidden": 48, "heads": 24, "sequence": 3, "vocabulary": 29, "std": 0.2}
WIDER = {"hidden": 96, "heads": 48, "kv_heads": 24, "ffn": 240}
KINDS = {
    "plain": (GPT2, ModelSizes(**SHAPE)),
    "untied, exact, dropout": (
        GPT2,
        ModelSizes(**SHAPE, tied=False, gelu="exact", dropout=0.25),
    ),
    "bert": (BERT, ModelSizes(**SHAPE, dropout=0.25, padding=7)),
    "llama": (LLAMA, ModelSizes(**SHAPE | WIDER, tied=False, dropout=0.25)),
    "qwen3, a key for all": (QWEN3, ModelSizes(**SHAPE | WIDER | {"kv_heads": 1, "head_dim": 4})),
    "olmo2, a key for all": (OLMO2, ModelSizes(**SHAPE | WIDER | {"kv_heads": 1}, dropout=0.25)),
    "gemma": (GEMMA, ModelSizes(**SHAPE | WIDER | {"head_dim": 4})),
    "gemma2": (
        GEMMA2,
        ModelSizes(**SHAPE | WIDER | {"score_cap": 0.7, "logit_cap": 1.5, "kv_heads": 1}),
    ),
    "gemma3": (
        GEMMA3,
        ModelSizes(**SHAPE | WIDER | {"window": 2, "global_every": 2, "dropout": 0.25}),
    ),
    "gpt_neox": (GPT_NEOX, ModelSizes(**SHAPE, dropout=0.25)),
    "roberta": (ROBERTA, ModelSizes(**SHAPE, dropout=0.25, padding=7)),
    "qwen2, a key for all": (QWEN2, ModelSizes(**SHAPE | WIDER | {"kv_heads": 1})),
}


def batch():
    """Batch in which some targets are ignored."""
    tokens = np.random.default_rng(3).integers(0, 29, (2, SEQUENCES, 3))
    tokens[1, 0] = IGNORE
    tokens[1, 7, 1] = IGNORE
    return tokens


def gradients(mesh, split, kind):
    """Return loss, gradient norm, and {name: (global shape, slices, value, gradient)}."""
    family, shape = kind
    model = Model(mesh, shape, split, family=family)
    totals = [model.gradients(*batch(), step=4), model.norm()]
    blocks = {
        item.name: (item.layout.slices(item.shape, mesh), item.value.copy(), item.grad.copy())
        for item in model.parameters
    }
    return totals, blocks


def serial(kind):
    return run({}, lambda mesh: gradients(mesh, Split(), kind))[0]


@pytest.fixture(scope="module", params=strided(KINDS, 3, 2, days=1))
def kind(request):
    return KINDS[request.param], serial(KINDS[request.param])


def same(found, expected):
    """Assert that blocks are slices of the serial model's tensors, and that padding is zero."""
    totals, blocks = found
    np.testing.assert_allclose(totals, expected[0], rtol=1e-10)
    assert blocks.keys() == expected[1].keys()
    for name, (where, value, gradient) in blocks.items():
        _, whole_value, whole_gradient = expected[1][name]
        bound = 1e-10 * np.abs(whole_gradient).max()
        np.testing.assert_array_equal(value, padded(whole_value, where)[where], name)
        np.testing.assert_allclose(
            gradient, padded(whole_gradient, where)[where], rtol=0, atol=bound, err_msg=name
        )


def padded(whole, where):
    """Pad the serial tensor with zero rows up to the end of `where`."""
    more = max(0, where[0].stop - whole.shape[0])
    return np.pad(whole, [(0, more)] + [(0, 0)] * (whole.ndim - 1))


def on_mesh(name, cuboid, data, kind):
    split = SPLITS[name] if data == 1 else SPLITS[name].over("d")
    shape, expected = kind
    for found in run(
        {"d": data, **sizes(name, cuboid)}, lambda mesh: gradients(mesh, split, shape)
    ):
        same(found, expected)


ON = distinct()


@pytest.mark.parametrize(("name", "cuboid"), strided(ON, 18))
def test_parallel_model_matches_the_serial_model(name, cuboid, kind):
    on_mesh(name, cuboid, 1, kind)


@pytest.mark.parametrize("name", strided(SPLITS, 5, 4))
def test_every_replica_matches_the_serial_model(name, kind):
    on_mesh(name, (2, 2, 2), 2, kind)


ZEROS = (0, 0), (3, 0), (0, 3)


@pytest.mark.parametrize("name", strided(SPLITS, 99, [*SPLITS].index("2d")))
def test_data_and_context_replicas_match_the_serial_model(name, kind):
    """Replicas along d and along c. ZeRO 3 along one of them shards the weights only there."""
    turn = [*SPLITS].index(name) + [*KINDS.values()].index(kind[0])
    zeros = ZEROS[turn % len(ZEROS)]
    split = SPLITS[name]
    for axis, zero in zip("dc", zeros, strict=True):
        split = split.over(axis, zero)
    shape, expected = kind
    mesh = {"d": 2, "c": 2, **sizes(name, (2, 2, 1))}
    for found in run(mesh, lambda mesh: gradients(mesh, split, shape)):
        same(found, expected)


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        pytest.param(8, "auto", marks=pytest.mark.slow),
        pytest.param(12, "mpi", marks=pytest.mark.slow),
    ],
)
def test_all_schemes_match_on_mpi_ranks(ranks, transport):
    out = checked(ranks, "-m", "tests.model.on_mpi", transport, timeout=250)
    assert out.split() == [*SPLITS, "done"]
