"""Float8 products on every layout, compared with products of whole matrices rounded by torch."""

import re
import subprocess
import sys
from functools import cache, partial

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.ops.float8 import E4M3, E5M2, Tiles
from hpc3d.tensor.matmul import sharded_matmul
from tests.ops.test_float8 import by_tile
from tests.pipeline.mixes import alone, config_of, same, train, trainer_of
from tests.predict.simulation.test_count import counted, every_rank
from tests.strided import strided
from tests.tensor.cases import SPLITS, distinct, sizes, splits
from tests.tensor.test_matmul import stored

M, K, N = 48, 288, 384  # edges of blocks cut tiles of 128


TILES = {
    "block": (Tiles(1, 128), Tiles(128, 128), Tiles(1, 128)),
    "tensor": (Tiles(M, K), Tiles(K, N), Tiles(M, N)),
}


def in_float8(matrix, tiles, dtype):
    return by_tile(matrix[:, None], tiles, dtype)[0][:, 0]


@cache
def operands(scales):
    """Return X, W and dY, and Y, dX and dW of the rounded operands."""
    rng = np.random.default_rng(0)
    shapes = (M, K), (K, N), (M, N)
    whole = [rng.normal(size=shape) * 2.0 ** rng.integers(-6, 6, shape) for shape in shapes]
    x, w, dy = map(in_float8, whole, TILES[scales], (E4M3, E4M3, E5M2))
    return *whole, x @ w, dy @ w.T, x.T @ dy


def compare(mesh, split, keep, scales):
    x, w, dy, *expected = operands(scales)
    matmul = sharded_matmul(mesh, split, keep, scales=scales)
    y, saved = matmul.forward_saving(stored(x, split.x, mesh), stored(w, matmul.w_layout, mesh))
    found = y, *matmul.backward_saved(saved, stored(dy, split.y, mesh))
    for ours, whole, layout in zip(
        found, expected, (split.y, split.x, matmul.dw_layout), strict=True
    ):
        part = stored(whole, layout, mesh)
        bound = 1e-10 * np.abs(whole).max()
        np.testing.assert_allclose(ours, part, rtol=0, atol=bound, err_msg=f"{split} {keep}")


@pytest.mark.slow
@pytest.mark.parametrize(("scales", "data"), [("block", 1), ("tensor", 2)])
@pytest.mark.parametrize(("name", "cuboid"), distinct())
def test_float8_products_match_rounded_matrices(name, cuboid, data, scales):
    def rank(mesh):
        for split in splits(name, data):
            for keep in ("xw", ""):
                compare(mesh, split, keep, scales)

    run({"d": data, **sizes(name, cuboid)}, rank)


def test_experts_have_their_own_scales():
    rng = np.random.default_rng(3)
    x, w = rng.normal(size=(M, 3, K)), rng.normal(size=(K, 3, N))
    w *= np.array([1, 10, 100])[:, None]

    def rank(mesh, scales):
        matmul = sharded_matmul(mesh, SPLITS["3d"], stacked=True, scales=scales)
        return matmul.forward(x, w)

    for scales, (of_x, of_w, _) in TILES.items():
        (found,) = run({}, partial(rank, scales=scales))
        rounded = by_tile(x, of_x, E4M3)[0], by_tile(w, of_w, E4M3)[0]
        wanted = np.einsum("mek,ken->men", *rounded)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-10 * abs(wanted).max())


# On other layouts a microbatch has other rows, and so has a tensor of it: only blocks of rows have
# the numbers of the whole batch.
SMALL = "layers=2 hidden=192 batch=16 steps=2 product_dtype=float8"
BLOCKS = [
    f"{SMALL} {line}"
    for line in (
        "x=2 schedule=none microbatches=2 scheme=1d",
        "x=2 y=2 z=2 schedule=none microbatches=1 scheme=3d-broadcast keep_gathered=false",
        "x=2 y=2 schedule=none microbatches=4 scheme=2d-summa kind=llama ffn=240 tied=false",
        "p=2 d=2 x=2 schedule=zb-h1 microbatches=4 zero=3 scheme=1d-sequence",
        "c=2 x=2 z=2 schedule=none microbatches=2 sequence=4 kind=bert recompute=full",
        "e=2 d=2 y=2 schedule=none microbatches=1 experts=4 top_k=2 shared_experts=1 zero=1",
        "d=2 z=2 microbatches=2 zero=2 scheme=3d x=1 y=1 kind=llama kv_heads=4 ffn=240",
        "x=2 y=2 schedule=none microbatches=2 scheme=2d recompute=selective dropout=0.25",
    )
]
TENSORS = [
    f"{SMALL} product_scale=tensor {line}"
    for line in (
        "x=2 y=2 z=2 schedule=none microbatches=1 scheme=3d",
        "p=2 x=2 schedule=1f1b microbatches=2 scheme=1d recompute=full",
        "p=2 d=2 y=2 schedule=zb-h1 microbatches=1 zero=3 kind=llama kv_heads=4 ffn=240",
        "c=2 d=2 schedule=none microbatches=1 zero=1 sequence=4",
        "e=2 x=2 y=2 schedule=none microbatches=1 scheme=2d-summa experts=4",
        "x=2 z=2 schedule=none microbatches=1 scheme=2.5d kind=bert",
    )
]


@pytest.mark.parametrize("line", strided(BLOCKS + TENSORS, 99))
@pytest.mark.slow
def test_float8_training_on_every_layout_matches_serial(line):
    config = config_of(line)
    found = run(config.sizes(), lambda mesh: train(mesh, config))
    micros = config.parallel.microbatches if config.train.product_scale == "tensor" else 1
    one = config_of(f"{alone(line)} schedule=none microbatches={micros}")
    (expected,) = run({}, lambda mesh: train(mesh, one))
    for each in found:
        same(each, expected)


@pytest.mark.slow
@pytest.mark.parametrize("line", strided(BLOCKS + TENSORS, 99, 2))
def test_predicted_traffic_and_flops_match_the_counted_ones(line):
    config = config_of(line)
    for ours, theirs in zip(every_rank(config, 29), counted(config), strict=True):
        assert ours.moved() == theirs.moved()
        assert ours.flops() == theirs.flops()


@pytest.mark.parametrize("dtype", strided(["float16", "bfloat16", "float32"], 3))
@pytest.mark.slow
def test_float8_losses_are_close_to_exact_ones(dtype):
    def losses(line):
        config = config_of(f"{line} dtype={dtype} layers=1 hidden=144 batch=12")

        def rank(mesh):
            trainer = trainer_of(mesh, config)
            return [trainer.step(number).loss for number in range(3)]

        return run({}, rank)[0]

    exact = losses("")
    for scales in ("block", "tensor"):
        rounded = losses(f"product_dtype=float8 product_scale={scales}")
        assert rounded != exact
        np.testing.assert_allclose(rounded, exact, rtol=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hundred_float8_steps_end_within_two_percent_of_float32(tmp_path):
    """Trains the default input with a 24th of its batch, and with a warm-up, without which float32
    itself is unstable; compares the mean loss of the last ten steps."""
    steady = "--train.batch", "8", "--train.learning_rate", "1e-3", "--train.warmup", "20"

    def loss(*words):
        command = [sys.executable, "-m", "hpc3d.train", "gpt-serial", "--train.steps", "100"]
        command += ["--run.out", str(tmp_path), *steady, *words]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return np.mean([float(each) for each in re.findall(r"^ *9\d +([\d.]+) ", out, re.M)])

    exact = loss()
    assert exact < 2.9  # it has learned something
    assert abs(loss("--train.product_dtype", "float8") / exact - 1) < 0.02
