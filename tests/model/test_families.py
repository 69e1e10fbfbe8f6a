"""What counts a model asks the family's lists: planted is a GPT-2 with an MLP of 3 h, and BERT in
its place."""

from dataclasses import replace

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
from hpc3d.model.stage import LAYER, build
from hpc3d.predict.planning.bounds import volumes
from hpc3d.tensor.split import Split
from hpc3d.training import footprint
from tests.analyze.naps import trained
from tests.analyze.traces import config_of

HIDDEN, HEADS, SEQUENCE = 24, 4, 6


def narrow_sizes(model, vocabulary):
    return replace(GPT2.sizes(model, vocabulary), ffn=3 * model.hidden)


PLANTED = {"gpt2": GPT2, "narrow": replace(GPT2, sizes=narrow_sizes), "bert": BERT}


@pytest.fixture(params=PLANTED)
def factor(request, monkeypatch):
    """The width of the MLP over that of the model."""
    monkeypatch.setitem(families.FAMILIES, "gpt2", PLANTED[request.param])
    return 3 if request.param == "narrow" else 4


@pytest.fixture
def dense():
    """The matrices of h^2 in the head, beside that of the table."""
    return int(families.FAMILIES["gpt2"] is BERT)


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


def test_the_products_are_the_matrices_of_a_block(factor):
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
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_a_block_keeps_of_a_token(factor, recompute, chunked):
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


@pytest.mark.parametrize("mesh", [{}, {"mesh__x": 2, "mesh__y": 2, "mesh__d": 2}])
def test_the_operations_are_those_recorded(factor, dense, mesh, tmp_path):
    trace = trained(tmp_path / "run", 8 if mesh else 1, train__steps=1, **mesh)
    found, model = efficiency_row(trace), config_of(1).model
    assert found["recorded_flop"] == pytest.approx(found["model_flop"], rel=1e-12)
    h, tokens = model.hidden, 24 * model.sequence
    block = 2 * (4 + 2 * factor) * h**2 + 4 * model.sequence * h
    assert model_flops(model, 24, 24) == 3 * tokens * (
        model.layers * block + 2 * h * (24 + dense * h)
    )


def test_words_volumes_and_memory_ask_the_products(factor, dense):
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
