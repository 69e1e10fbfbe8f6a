"""The layout of an evaluation, and the same loss on every layout."""

from math import prod

import pytest

from hpc3d.checkpoints.inspect import shapes_of
from hpc3d.checkpoints.sharded import restore
from hpc3d.comm.threads import run
from hpc3d.data.token_file import open_tokens
from hpc3d.generation.evaluation_layout import evaluation_layout
from hpc3d.generation.trained_model import find_weights
from hpc3d.training import footprint
from hpc3d.training.evaluator import FrozenEvaluator, FrozenModel
from hpc3d.training.masking import validation_of
from tests.checkpoints import drawn_models
from tests.pipeline.mixes import config_of
from tests.strided import strided

RUN = "x=2 y=2 z=2 schedule=none microbatches=2 scheme=3d dropout=0.25"
STAGES = "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=3 scheme=1d optimizer=muon"


def mesh_of(config):
    return {axis: size for axis, size in config.sizes().items() if size > 1}


def options(text):
    return [word for pair in text.split() for word in (f"--{pair}".split("=", 1))]


def test_layout_of_the_run_is_kept_on_the_same_number_of_ranks():
    config = evaluation_layout(config_of(STAGES), [], 8)
    assert mesh_of(config) == {"p": 2, "d": 2, "x": 2}
    parallel = config.parallel
    assert (parallel.scheme, parallel.zero, parallel.schedule) == ("1d", 3, "1f1b")
    assert (config.train.batch, config.train.dtype) == (48, "float64")
    other = evaluation_layout(config_of(STAGES), options("parallel.zero=0"), 8)
    assert (mesh_of(other), other.parallel.zero) == (mesh_of(config), 0)


def test_other_ranks_or_sizes_start_from_the_defaults():
    config = evaluation_layout(config_of(STAGES), [], 4)
    assert (mesh_of(config), config.parallel.zero) == ({"x": 4}, 0)
    config = evaluation_layout(config_of(STAGES), options("mesh.d=4 mesh.x=2"), 8)
    assert (mesh_of(config), config.parallel.zero) == ({"d": 4, "x": 2}, 0)
    config = evaluation_layout(config_of(RUN), options("parallel.scheme=1d mesh.x=4"), 4)
    assert (mesh_of(config), config.parallel.scheme) == ({"x": 4}, "1d")


def test_asynchronous_schedule_is_replaced():
    pipedream = "p=2 schedule=pipedream microbatches=4 clip=0 tied=false layers_per_stage=[1,3]"
    config = evaluation_layout(config_of(pipedream), [], 2)
    assert (config.parallel.schedule, [*map(len, config.layers())]) == ("1f1b", [1, 3])


def test_nothing_is_dropped():
    mixture = config_of("e=2 schedule=none microbatches=2 experts=4 capacity=1.5 dropout=0.25")
    model = evaluation_layout(mixture, [], 2).model
    assert (model.capacity, model.dropout) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("words", "ranks", "count"),
    [
        ("", 1, 12),  # 48 sequences of 1,024 tokens in microbatches of 4
        ("mesh.d=2", 2, 6),
        ("mesh.p=2", 2, 12),
        ("parallel.microbatches=3", 1, 3),
        ("train.batch=2", 1, 1),
    ],
)
def test_microbatches_have_4096_tokens_per_rank_of_a_stage(words, ranks, count):
    config = evaluation_layout(config_of("sequence=1024"), options(words), ranks)
    assert config.parallel.microbatches == count


SMALL = "vocabulary=256 sequence=8 layers=2 batch=16"
MODELS = {
    "gpt2": SMALL,
    "llama": f"{SMALL} kind=llama kv_heads=4 ffn=48 tied=false",
    "experts": f"{SMALL} kind=llama ffn=48 experts=4 top_k=2 capacity=0.5 balance_bias=0.01",
    "bert": f"{SMALL} kind=bert vocabulary=257 ffn=48",
}
LAYOUTS = [
    "mesh.x=2 mesh.y=2 parallel.scheme=2d",
    "mesh.p=2",
    "mesh.d=2 parallel.zero=3",
    "mesh.c=2",
    "mesh.d=2 mesh.x=2 parallel.zero=3 parallel.microbatches=2 train.batch=8",
    "mesh.p=2 mesh.c=2",
    'mesh.d=2 parallel.offload=["parameters"]',
]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the cat sat on the mat; größer\n" * 9, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the checkpoint of a model, saved once."""
    folders = {}

    def checkpoint(kind):
        if kind not in folders:
            folder = tmp_path_factory.mktemp(kind)
            folders[kind] = drawn_models.saved(folder, f"schedule=none {MODELS[kind]}")
        return folders[kind]

    return checkpoint


def evaluated(path, words, ranks, text):
    """Return the evaluation and the peaks of the memory of each rank."""
    found = find_weights("evaluate", path, [])
    config = evaluation_layout(found.config, options(words), ranks)

    def rank(mesh):
        model, batches = FrozenModel(mesh, config), None
        restore(found.source.open(config), model.parameters, None)
        if mesh.rank == 0:
            batches = validation_of(config, open_tokens(text), remainder=True)
        return FrozenEvaluator(model, batches and [batches]).evaluate(0), dict(mesh.pool.peak)

    return run(config.sizes(), rank)


def ranks_of(words):
    return prod(int(word.partition("=")[2]) for word in words.split() if "mesh." in word)


CASES = [("experts", "mesh.e=2"), *((kind, words) for kind in MODELS for words in LAYOUTS)]


@pytest.mark.parametrize(("kind", "words"), strided(CASES, 4, ids=" ".join))
def test_every_layout_has_the_loss_of_one_rank(kind, words, saved, text):
    """The masks of BERT depend on the batch, so its batch is the same."""
    if kind == "bert":
        words = words.replace(" train.batch=8", "")
    ((expected, _),) = evaluated(saved(kind), "", 1, text)
    if kind != "bert":
        assert expected.tokens == len(text.read_bytes())
    for found, _ in evaluated(saved(kind), words, ranks_of(words), text):
        assert found[1:4] == pytest.approx(expected[1:4], rel=1e-10)


@pytest.mark.parametrize("kind", ["gpt2", "experts"])
def test_only_parameters_are_allocated(kind, saved, text):
    found = find_weights("evaluate", saved(kind), [])
    total = sum(map(prod, shapes_of(found.config.model).values()))
    ((_, alone),) = evaluated(saved(kind), "", 1, text)
    assert alone["parameter"] == 8 * total
    config = evaluation_layout(found.config, [], 1)
    bound = footprint.parameters(config, training=False)
    assert 0.9 * alone["parameter"] < bound <= alone["parameter"]
    assert footprint.least(config, training=False) <= alone["all"]
    pairs = evaluated(saved(kind), "mesh.d=2 parallel.zero=3", 2, text)
    for _, peak in pairs:
        assert peak["parameter"] < 0.6 * alone["parameter"]
        assert not peak.get("gradient") and not peak.get("optimizer")
