"""All counts of products and memory use the lists of the model family, tested with a GPT-2 with an
MLP of width 3 h, and with BERT."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest

from hpc3d.analyze.metrics.mfu import efficiency_row, model_flops
from hpc3d.comm.abstract_communicator import abstract_mesh
from hpc3d.config.cuboid import received_elements
from hpc3d.config.input_file import Config
from hpc3d.model import families
from hpc3d.model.families import BERT, GPT2, block_products, block_weights
from hpc3d.model.microbatch import microbatches
from hpc3d.model.parameters import Parameters
from hpc3d.model.spec import ModelSpec
from hpc3d.model.stage import LAYER, LayerRange, build
from hpc3d.predict.planning import bounds
from hpc3d.predict.planning.bounds import volumes
from hpc3d.tensor.split import Split
from hpc3d.training import footprint
from tests.analyze.delayed_runs import trained
from tests.analyze.traces import config_of
from tests.strided import strided

HIDDEN, HEADS, SEQUENCE = 24, 4, 6


def narrow_sizes(model, vocabulary):
    return replace(GPT2.sizes(model, vocabulary), ffn=3 * model.hidden)


PLANTED = {"gpt2": GPT2, "narrow": replace(GPT2, sizes=narrow_sizes), "bert": BERT}


@pytest.fixture(params=PLANTED)
def factor(request, monkeypatch):
    """Ratio of the widths of the MLP and the model."""
    monkeypatch.setitem(families.FAMILIES, "gpt2", PLANTED[request.param])
    monkeypatch.setattr(bounds, "_weights", bounds._weights.__wrapped__)  # without a cache
    return 3 if request.param == "narrow" else 4


@pytest.fixture
def dense():
    """Number of h^2 matrices in the head, besides the table."""
    return int(families.FAMILIES["gpt2"] is BERT)


RECOMPUTE = "none", "selective", ("layernorm", "mlp_act"), ("core_attn", "mlp"), "full"


def model_of(config):
    return replace(config.model, hidden=HIDDEN, heads=HEADS, sequence=SEQUENCE, vocabulary=48)


def stage_of(config, recompute="none", chunked=False):
    family = families.family_of(config.model)
    sizes = family.sizes(config.model, config.model.vocabulary)
    mesh = abstract_mesh({}, {})
    parameters = Parameters(mesh, "float64")
    spec = ModelSpec(family, sizes, {"dense": Split()}, recompute=recompute, chunked=chunked)
    (stage,) = build(mesh, parameters, spec, [LAYER])
    parameters.allocate(1)
    return mesh, parameters, stage


def test_block_products_match_the_weight_matrices(factor):
    config = replace(Config(), model=model_of(Config()))
    _, parameters, _ = stage_of(config)
    matrices = {
        item.name.split(".")[2]: item.shape for item in parameters if "weight" in item.name
    }
    products = block_products(config.model)
    assert {each.name: (each.inputs, each.outputs) for _, each in products} == matrices
    assert {count for count, _ in products} == {config.model.layers}
    weights = config.model.layers * (4 + 2 * factor) * HIDDEN**2
    assert block_weights(config.model) == (weights, weights)


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_saved_activations_of_a_block_match_the_family_formula(factor, recompute, chunked):
    config = replace(Config(), model=model_of(Config()))
    mesh, _, stage = stage_of(config, recompute, chunked)
    tokens = np.zeros((2, SEQUENCE), np.int32)
    (micro,) = microbatches(0, tokens, tokens, 1)
    before = mesh.pool.live.total()
    kept = stage.forward(mesh.zeros((2 * SEQUENCE, HIDDEN), "float64"), micro)[1]
    assert kept
    family = families.family_of(config.model)
    elements = (mesh.pool.live.total() - before) / 8 / tokens.size
    assert elements == family.kept(family.sizes(config.model, 48), recompute, chunked, False)


@pytest.mark.parametrize("mesh", strided([{}, {"mesh__x": 2, "mesh__y": 2, "mesh__d": 2}], 2))
def test_model_flops_match_the_recorded_flops(factor, dense, mesh, tmp_path):
    trace = trained(tmp_path / "run", 8 if mesh else 1, train__steps=1, **mesh)
    found, model = efficiency_row(trace), config_of(1).model
    assert found["recorded_flop"] == pytest.approx(found["model_flop"], rel=1e-12)
    h, tokens = model.hidden, 24 * model.sequence
    block = 2 * (4 + 2 * factor) * h**2 + 4 * model.sequence * h
    assert model_flops(model, 24, 24) == 3 * tokens * (
        model.layers * block + 2 * h * (24 + dense * h)
    )


def test_volume_and_memory_estimates_use_the_block_products(factor, dense):
    config = replace(Config(), model=model_of(Config()))
    halves = replace(config, mesh=replace(config.mesh, x=2, y=1, z=1))
    weights = (4 + 2 * factor) * HIDDEN**2
    assert (
        received_elements(halves) == weights / 2
    )  # a rank of m receives the other half of the weights
    replicas = replace(config, mesh=replace(config.mesh, d=2, x=1, y=1, z=1))
    assert volumes(replicas)["d"] == weights * config.model.layers
    alone = replace(config, mesh=replace(config.mesh, x=1, y=1, z=1))
    tables = (48 + SEQUENCE + dense * HIDDEN) * HIDDEN
    vectors = config.model.layers * (3 + 1 + factor + 1 + 4) * HIDDEN  # biases, and norms
    vectors += (2 + 2 + 1 + 2) * HIDDEN + 48 if dense else 2 * HIDDEN
    elements = config.model.layers * weights + tables + vectors
    assert footprint.parameters(alone) == 4 * 4 * elements


# Mixtures of experts

MIXTURES = {
    "gpt2": {"experts": 6, "top_k": 2, "moe_every": 2, "shared_experts": 2, "capacity": 1.0},
    "switch": {"experts": 4, "capacity": 0.5, "balance_bias": 0.1, "tied": False},
    "llama": {
        "kind": "llama",
        "experts": 4,
        "top_k": 2,
        "capacity": 2.0,
        "ffn": 20,
        "head_dim": 10,
    },
}


MIXTURES["qwen3"] = MIXTURES["llama"] | {"kind": "qwen3", "shared_experts": 1}


@pytest.fixture(params=MIXTURES)
def mixture(request):
    """Configuration with experts in all of its 5 blocks, or in 2."""
    return replace(
        Config(), model=replace(model_of(Config()), layers=5, **MIXTURES[request.param])
    )


def parameters_of(config, part, mesh=None, **how):
    """Return the Parameters of a part of the model on one rank, and its stage."""
    family = families.family_of(config.model)
    sizes = family.sizes(config.model, config.model.vocabulary)
    mesh = mesh or abstract_mesh({}, {})
    parameters = Parameters(mesh, "float64", config.parallel.zero)
    (stage,) = build(mesh, parameters, ModelSpec(family, sizes, config.splits, **how), [part])
    parameters.allocate(1)
    return parameters, stage


def size_of(items, words=""):
    return sum(prod(item.shape) for item in items if words in item.name)


def test_total_and_active_parameters_of_a_mixture(mixture):
    model = mixture.model
    built, _ = parameters_of(mixture, LayerRange(range(5), first=True, last=True))
    matrices = [item for item in built if item.name.startswith("layers.") and item.decay]
    idle = (model.experts - model.top_k) / model.experts  # experts that a token does not go to
    for found, items in ((families.parameters(model), built), (block_weights(model), matrices)):
        assert found == (size_of(items), size_of(items) - idle * size_of(items, ".experts."))
    assert families.expert_parameters(model) == size_of(built, ".experts.")
    assert families.expert_weights(model) == size_of(matrices, ".experts.")


def test_mixture_products_match_the_weight_matrices(mixture):
    built, _ = parameters_of(mixture, LayerRange(range(1, 2), first=False, last=False))
    matrices = {
        item.name.removeprefix("layers.1.").removesuffix(".weight"): item.shape
        for item in built
        if item.name.endswith("weight")
    }
    products = {each.name: each for _, each in block_products(mixture.model)}
    assert matrices.keys() <= products.keys()
    for name, shape in matrices.items():
        each = products[name]
        assert shape == (
            (each.inputs, each.experts, each.outputs)
            if name.startswith("experts.")
            else (each.inputs, each.outputs)
        )


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_saved_activations_of_a_mixture_match_the_family_formula(mixture, recompute, chunked):
    part = LayerRange(range(1, 2), first=False, last=False)
    how = {"recompute": recompute, "chunked": chunked}
    parameters, stage = parameters_of(mixture, part, **how)
    tokens = np.zeros((2, SEQUENCE), np.int32)
    (micro,) = microbatches(0, tokens, tokens, 1)
    pool = parameters.mesh.pool
    before = pool.live.total()
    kept = stage.forward(parameters.mesh.zeros((2 * SEQUENCE, HIDDEN), "float64"), micro)[1]
    assert kept
    elements = (pool.live.total() - before) / 8 / tokens.size
    family = families.family_of(mixture.model)
    sizes = family.sizes(mixture.model, 48)
    assert elements == pytest.approx(family.kept(sizes, recompute, chunked, True), rel=1e-12)


OWN = {"kv_heads": 2, "head_dim": 10, "ffn": 20}  # sizes of keys that only some families have


@pytest.fixture(params=families.FAMILIES)
def kind(request):
    """Configuration of a family, with two blocks."""
    keys = families.FAMILIES[request.param].keys & OWN.keys()
    how = {"kind": request.param, "layers": 2, **{key: OWN[key] for key in keys}}
    return replace(Config(), model=replace(model_of(Config()), **how))


def test_number_of_parameters_of_each_family(kind):
    built, _ = parameters_of(kind, LayerRange(range(2), first=True, last=True))
    assert families.parameters(kind.model).total == size_of(built)


@pytest.mark.parametrize("chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_saved_activations_of_each_family(kind, recompute, chunked):
    parameters, stage = parameters_of(kind, LAYER, recompute=recompute, chunked=chunked)
    tokens, pool = np.zeros((2, SEQUENCE), np.int32), parameters.mesh.pool
    (micro,) = microbatches(0, tokens, tokens, 1)
    before = pool.live.total()
    kept = stage.forward(parameters.mesh.zeros((2 * SEQUENCE, HIDDEN), "float64"), micro)[1]
    assert kept
    family = families.family_of(kind.model)
    expected = family.kept(family.sizes(kind.model, 48), recompute, chunked, False)
    assert (pool.live.total() - before) / 8 / tokens.size == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [{}, {"mesh__e": 2, "mesh__x": 2, "mesh__z": 2}, {"mesh__e": 4, "mesh__d": 2}]
)
@pytest.mark.parametrize(("capacity", "slots"), strided([(1, 2), (1.5, 3), (2, 4)], 3, 1))
def test_mixture_flops_match_the_recorded_ones_except_empty_slots(mesh, capacity, slots, tmp_path):
    """Each of 4 tokens uses 2 of 4 experts; every other one of 8 blocks is a mixture."""
    how = {"model__experts": 4, "model__top_k": 2, "model__capacity": capacity}
    how |= {"model__moe_every": 2, "model__shared_experts": 1}
    trace = trained(tmp_path / "run", 8 if mesh else 1, train__steps=1, **how, **mesh)
    found = efficiency_row(trace)
    tokens, h = 24 * 4, 8
    expert = 2 * (4 + 4) * h**2  # operations of a token in one
    block, mlp = 2 * 4 * h**2 + 4 * 4 * h, expert
    router = 2 * h * 4
    model = 8 * block + 4 * mlp + 4 * (2 * expert + mlp + router) + 2 * h * 24
    assert found["model_flop"] == 3 * tokens * model
    empty = 4 * (4 * slots - 2 * 4) / 4 * expert
    assert found["recorded_flop"] == pytest.approx(3 * tokens * (model + empty), rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("axes", ["", "e", "d e", "c e"])
def test_parameter_memory_of_a_rank_matches_the_footprint(axes, zero):
    """Counts values, gradients and states in float32, without padding of equal shards. With ZeRO 2
    and 3, values and gradients of vectors and positions are unsharded, too."""
    mesh = dict.fromkeys(axes.split(), 2)
    model = replace(Config().model, hidden=64, heads=4, vocabulary=256, experts=4, layers=2)
    config = replace(
        Config(),
        model=model,
        mesh=replace(Config().mesh, x=1, y=1, z=1, **mesh),
        parallel=replace(Config().parallel, zero=zero),
    )
    built, _ = parameters_of(
        config, LayerRange(range(2), first=True, last=True), abstract_mesh(mesh, {})
    )
    held = 4 * (
        built.value.size + built.grad.size + 2 * sum(place.own for place in built.slices.values())
    )
    others = size_of(built) - size_of(built, "weight") - size_of(built, "embedding.token")
    least = footprint.parameters(config)
    if zero == 0:
        assert held == least
    else:
        assert least <= held <= 1.001 * least + (8 * others if zero > 1 else 0)
