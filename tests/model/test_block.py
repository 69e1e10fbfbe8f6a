"""Recomputation is bitwise exact, and frees the memory of what it recomputes.

Memory is counted in elements; n = b s h is the number of elements of X if a rank stores all of it.
"""

from functools import cache
from itertools import cycle
from shlex import quote

import numpy as np
import pytest

from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.comm.threads import run
from hpc3d.model.block import Block
from hpc3d.model.families import GPT2
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSizes, ModelSpec
from hpc3d.pipeline.engine import DeferredWeightGrads
from hpc3d.tensor.split import SCHEMES
from tests.jobs import Case
from tests.pipeline.mixes import config_of, cover, ranks, same, train, trainer_of
from tests.pipeline.on_mpi import expected
from tests.strided import strided

# Every scheme, schedules that part B and W, stashed weights, dropout, ZeRO.
MIXES = """
p=1 schedule=none microbatches=2 dropout=0.25 gelu=exact
x=4 schedule=none microbatches=2 scheme=1d dropout=0.25
x=2 z=2 schedule=none microbatches=2 scheme=2.5d
x=2 y=2 z=2 schedule=none microbatches=1 scheme=3d-broadcast
y=3 z=2 schedule=none microbatches=1 keep_gathered=false dropout=0.25
p=2 x=2 schedule=zb-h1 microbatches=3 scheme=1d-sequence dropout=0.25
p=2 x=2 y=2 schedule=1f1b microbatches=3 scheme=2d-summa
p=2 d=2 x=2 schedule=interleaved chunks=2 microbatches=3 zero=3 dropout=0.25
p=2 d=2 x=2 schedule=zb-v chunks=2 microbatches=3 zero=2 scheme=2d tied=false
p=4 schedule=pipedream microbatches=4 tied=false clip=0
p=2 d=2 schedule=pipedream microbatches=4 zero=3 tied=false clip=0
p=2 x=2 y=2 schedule=pipedream-2bw microbatches=4
""".strip().splitlines()


@cache
def trained(line, recompute):
    config = config_of(f"{line} steps=3 recompute={quote(recompute)}")
    return run(config.sizes(), lambda mesh: train(mesh, config))


@pytest.mark.slow
@pytest.mark.parametrize("line", strided(MIXES, 11, 6))
def test_full_recomputation_is_bitwise_equal_to_serial_training(line):
    is_serial_and_the_same_to_the_last_bit(line, "full")


@pytest.mark.parametrize("line", strided(MIXES, 11, 6))
def test_selective_recomputation_is_bitwise_equal_to_serial_training(line):
    is_serial_and_the_same_to_the_last_bit(line, "selective")


PRODUCTS, CHEAP = ("core_attn", "layernorm", "mlp"), ("layernorm", "mlp_act")


@pytest.mark.parametrize(
    ("line", "modules"), strided([*zip(MIXES, cycle((PRODUCTS, CHEAP)))], 11, 6)
)
def test_recomputation_of_modules_is_bitwise_equal_to_serial_training(line, modules):
    is_serial_and_the_same_to_the_last_bit(line, str([*modules]))


NARROW = """
x=2 schedule=none microbatches=2 scheme=1d-sequence dtype=bfloat16 kind=llama ffn=48
p=2 schedule=zb-h1 microbatches=2 dtype=float16 dropout=0.25 'offload=["activations"]'
e=2 schedule=none microbatches=2 dtype=bfloat16 experts=4 shared_experts=1
""".strip().splitlines()


@pytest.mark.parametrize("line", strided(NARROW, 3))
def test_recomputation_of_modules_in_16_bits_is_bitwise_equal(line):
    for modules in CHEAP, PRODUCTS:
        are_the_same_to_the_last_bit(trained(line, str([*modules])), trained(line, "none"))


def is_serial_and_the_same_to_the_last_bit(line, recompute):
    found, wanted = trained(line, recompute), expected(f"{line} steps=3")
    are_the_same_to_the_last_bit(found, trained(line, "none"))
    for ours in found:
        same(ours, wanted)
    cover(found, wanted)


def are_the_same_to_the_last_bit(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.totals == theirs.totals
        for name, (_, block) in ours.weights.items():
            np.testing.assert_array_equal(block, theirs.weights[name][1], name)


RECOMPUTED = [line for line in MIXES if ranks(line) == 8 and "pipedream" not in line]


@pytest.mark.slow
@pytest.mark.timeout(0)  # tests.jobs limits each case
@pytest.mark.parametrize(
    "case", [Case(8, "auto", f"{line} steps=3 recompute=full") for line in RECOMPUTED], ids=str
)
def test_recomputation_on_mpi_ranks(run_in_job, case):
    """Ranks allocate and release shared memory in the same order."""
    run_in_job("tests.pipeline.on_mpi", case)


B, T, H, HEADS = 12, 4, 24, 12
N, SCORES = B * T * H, B * HEADS * T * T  # elements of X and of the probabilities
MODEL = ModelSizes(layers=1, hidden=H, heads=HEADS, sequence=T, vocabulary=29)


def block_on(mesh, scheme="1d", keep="", recompute="none"):
    parameters, split = Parameters(mesh, "float64"), SCHEMES[scheme]
    spec = ModelSpec(GPT2, MODEL, {"dense": split}, keep, recompute=recompute)
    block = Block(mesh, parameters, spec, 0)
    parameters.allocate(1)
    return block, split.x.block((B * T, H), mesh)


def live(mesh):
    """Return the number of elements of all arrays except parameters and gradients."""
    kinds = mesh.pool.live
    return (kinds.total() - kinds["parameter"] - kinds["gradient"]) / 8


def kept(mesh, *how):
    """Return the saved elements that remain after X and Y are released elsewhere."""
    block, shape = block_on(mesh, *how)
    saved = block.forward(mesh.zeros(shape, "float64"), None)[1]
    assert saved
    return live(mesh)


# Scheme, sizes, operands kept; the share of N, SCORES and H^2 that "none" keeps, and N of "full".
# The inputs of the two norms' gradients (2), of the four products (1 + 1 + 1 + 4), q, k and v (3),
# GELU's slope (4): 32 of the 34 bytes of arXiv:2205.05198, table 2, in numbers of 2 bytes.  The
# other 2, and 3 of its 5 a s / h, are masks and what they leave, which are made again here.
# "1d" shards 12 of the 16 (24 / t bytes) and not those of the norms and of the layers' X.
FORMS = {
    "one rank": ("1d", {}, "xw", 16, 1, 0, 1),
    "tensor parallel": ("1d", {"x": 3}, "xw", 4 + 12 / 3, 1 / 3, 0, 1),
    "and sequence": ("1d-sequence", {"x": 3}, "", 16 / 3, 1 / 3, 0, 1 / 3),
    "and sequence, X kept": ("1d-sequence", {"x": 3}, "xw", 2 + 14 / 3, 1 / 3, 0, 1 / 3),
    "cube": ("3d", {"x": 2, "y": 2, "z": 2}, "", 16 / 8, 1 / 8, 0, 1 / 8),
    # Gathered along one axis: all X (7) and all W (12 h^2).
    "cube, X and W kept": (
        *("3d", {"x": 2, "y": 2, "z": 2}, "xw"),
        *(9 / 8 + 7 / 4, 1 / 8, 12 / 4, 1 / 8),
    ),
}
# The share of N with CHEAP, without the outputs of norms (2) and of GELU (4), and with PRODUCTS,
# also without GELU's slope (4). Products gather the outputs again, and "mlp" W of up (4 H^2).
OF_MODULES = {
    "one rank": (10, 6),
    "tensor parallel": (2 + 8 / 3, 2 + 4 / 3),
    "and sequence": (10 / 3, 6 / 3),
    "and sequence, X kept": (10 / 3, 6 / 3),
    "cube": (10 / 8, 6 / 8),
    "cube, X and W kept": (9 / 8 + 1 / 4, 5 / 8 + 1 / 4),
}


@pytest.mark.parametrize("form", FORMS)
def test_saved_activations_of_a_block(form):
    scheme, sizes, keep, tokens, scores, weights, whole = FORMS[form]
    cheap, products = OF_MODULES[form]
    wanted = {
        CHEAP: cheap * N + scores * SCORES + weights * H * H,
        PRODUCTS: products * N + (weights * 8 / 12) * H * H,
        "none": tokens * N + scores * SCORES + weights * H * H,
        "selective": tokens * N + weights * H * H,
        "full": whole * N,
    }
    for recompute, elements in wanted.items():
        mesh = abstract_mesh(sizes, dict.fromkeys(sizes, 0))
        assert kept(mesh, scheme, keep, recompute) == pytest.approx(elements, rel=1e-15)
        if not sizes:
            (found,) = run({}, lambda mesh, how=(scheme, keep, recompute): kept(mesh, *how))
            assert found == elements


@pytest.mark.parametrize("recompute", ["none", "selective", CHEAP, PRODUCTS, "full"], ids=str)
def test_only_the_operands_of_dw_are_saved_between_b_and_w(recompute):
    """X (1 + 1 + 1 + 4) and dY (3 + 1 + 4 + 1) of four products: M_W of arXiv:2401.10241, 32 s b h
    bytes with 2 bytes per number."""

    def rank(mesh):
        block, shape = block_on(mesh, recompute=recompute)
        defer = DeferredWeightGrads(mesh.trace)
        saved = block.forward(mesh.zeros(shape, "float64"), None)[1]
        dy = mesh.zeros(shape, "float64")
        block.backward(dy, saved, None, defer)
        del saved, dy
        between = live(mesh)
        defer.run()
        return between, live(mesh)

    assert run({}, rank) == [(16 * N, 0)]


SLOPES = {
    "none": 16 * N + SCORES,
    "selective": 16 * N,
    str([*CHEAP]): 10 * N + SCORES,
    str([*PRODUCTS]): 6 * N,
    "full": N,
}


@pytest.mark.parametrize("dropout", [0, 0.25])
@pytest.mark.parametrize("recompute", SLOPES)
def test_peak_memory_grows_per_layer_by_its_saved_activations(recompute, dropout):
    sizes = f"batch={B} sequence={T} hidden={H} heads={HEADS} dropout={dropout}"
    first, second, fifth = (
        peak(f"layers={layers} {sizes} recompute={quote(recompute)}") for layers in (1, 2, 5)
    )
    # Selective: the probabilities are gone when the peak comes, in the products of qkv.
    gone = SCORES if recompute == "selective" or "core_attn" in recompute else 0
    assert first == peak(f"layers=1 {sizes} recompute=none") - gone
    assert (second - first, fifth - second) == (SLOPES[recompute], 3 * SLOPES[recompute])


def peak(line):
    """Return the elements of activations and messages at the peak of a step on one rank."""
    config = config_of(f"schedule=none {line}")

    def rank(mesh):
        trainer = trainer_of(mesh, config)
        trainer.step(0)
        trainer.step(1)
        kinds = mesh.pool.live
        fixed = sum(kinds[kind] for kind in ("parameter", "gradient", "optimizer"))
        return (mesh.pool.peak["all"] - fixed) / 8

    return run({}, rank)[0]
