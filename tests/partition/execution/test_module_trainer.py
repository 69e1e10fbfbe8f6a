"""A partitioned module on threads, compared with the whole module in torch."""

import numpy as np
import pytest

pytest.importorskip("torch")

from hpc3d.comm.stage_mesh import ranks_of
from hpc3d.comm.threads import run_stages
from hpc3d.model.parameters import Parameters
from hpc3d.partition.execution.module_trainer import TiedBuckets, lines_of_owners
from hpc3d.tensor.layout import Layout
from tests.partition.execution.counted_bytes import peaks
from tests.partition.execution.modules import (
    HERE,
    assert_trained_alike,
    prepared,
    state,
    trained,
    trained_by_torch,
    with_data,
)
from tests.partition.untraceable_models import HERE as UNTRACEABLE
from tests.partition.user_models import HERE as USERS
from tests.partition.user_models import OUTPUTS
from tests.strided import rotated

MODELS = ("bert", "resnet", "unet", "densenet", "translation")
EVERYTHING, CHAIN = f"{HERE}:everything", f"{HERE}:chain"
OWNERS = {"a": (0,), "b": (0, 2), "c": (1, 2), "d": (2,)}
SMALL = [f"inputs.partition.{name}:small" for name in MODELS]


@pytest.mark.parametrize(
    ("replicas", "micros", "schedule", "how"),
    [
        ((1,), 1, "none", {}),
        ((1, 1), 4, "1f1b", {}),
        ((1, 1, 1), 3, "gpipe", {"recompute": True}),
        ((1, 1), 2, "interleaved", {"chunks": 2}),
        ((1, 1), 4, "zb-h1", {}),
        ((1, 1, 1), 4, "zb-h2", {"recompute": True}),
    ],
)
def test_pipeline_training_matches_torch(replicas, micros, schedule, how):
    """Compares parameters and buffers after three steps; BatchNorm sees single microbatches."""
    found = trained(EVERYTHING, replicas, micros, schedule, **how)
    assert_trained_alike(found, trained_by_torch(EVERYTHING, micros))


@pytest.mark.parametrize(
    ("replicas", "micros", "how"),
    [((2,), 2, {}), ((2, 2), 3, {"zero": 1}), ((1, 3), 2, {}), ((3, 2), 2, {"zero": 1})],
)
def test_replicated_stages_match_torch(replicas, micros, how):
    found = trained(CHAIN, replicas, micros, "1f1b" if replicas[1:] else "none", **how)
    assert_trained_alike(found, trained_by_torch(CHAIN, micros))


@pytest.mark.parametrize("replicas", [(1, 2), pytest.param((3, 1, 2), marks=pytest.mark.slow)])
def test_time_major_rows_are_split_by_samples(replicas):
    """The stage boundary is in the middle of [T, B] rows."""
    found = trained(f"{HERE}:time_major", replicas, 2, "1f1b")
    assert_trained_alike(found, trained_by_torch(f"{HERE}:time_major", 2))


@pytest.mark.parametrize(
    ("replicas", "micros", "schedule", "how"),
    [
        ((2, 1), 2, "zb-h1", {"zero": 1}),
        ((2, 2), 3, "zb-h2", {"zero": 1}),
        ((1, 3, 2), 4, "zb-h1", {"recompute": True}),
    ],
)
def test_delayed_weight_gradients_are_reduced(replicas, micros, schedule, how):
    found = trained(CHAIN, replicas, micros, schedule, **how)
    assert_trained_alike(found, trained_by_torch(CHAIN, micros))


@pytest.mark.parametrize(("replicas", "schedule"), [((2,), "none"), ((2, 1), "1f1b")])
def test_replicas_average_their_batch_norm_buffers(replicas, schedule):
    """Each replica normalizes by its own rows, and updates its running averages with them; at the
    end of the step, the averages are the mean over all replicas."""
    (one, _), (other, _), *_ = trained(EVERYTHING, replicas, 2, schedule)
    start = state(with_data(EVERYTHING)[0])
    for name in ("norm.running_mean", "norm.running_var"):
        assert (one[name] == other[name]).all() and (one[name] != start[name]).any()
    assert one["norm.num_batches_tracked"] == 6


def test_samples_keep_the_order_of_the_batch():
    """Two replicas have uneven microbatches: 12 samples in 5."""
    found = trained(CHAIN, (2, 2), 5, "1f1b")
    assert_trained_alike(found, trained_by_torch(CHAIN, 5))


@pytest.mark.parametrize(
    ("name", "replicas", "micros", "how"),
    [
        ("three", (1, 1, 1), 3, {"recompute": True}),
        ("three", (2, 1), 2, {}),
        pytest.param("choosy", (1, 1), 2, {}, marks=pytest.mark.slow),
        pytest.param("experts", (1, 2), 2, {}, marks=pytest.mark.slow),
        pytest.param("straight", (1, 1, 1), 2, {"recompute": True}, marks=pytest.mark.slow),
    ],
)
def test_opaque_modules_train_as_in_torch(name, replicas, micros, how):
    name = f"{UNTRACEABLE}:{name}"
    assert prepared(name)[-1].opaque
    found = trained(name, replicas, micros, "1f1b", **how)
    assert_trained_alike(found, trained_by_torch(name, micros))


OF_USERS = ("star", "named", "compiled", "parallel", "compiled_inside", "twice", "spectral")
OF_USERS += ("idle", "initialized", "read_rates")


@pytest.mark.parametrize(
    "name",
    [
        *("constants", "untrained"),
        *(pytest.param(f"returns({kind!r})", marks=pytest.mark.slow) for kind in OUTPUTS),
        *(pytest.param(name, marks=pytest.mark.slow) for name in OF_USERS),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_models_as_users_write_them_match_torch(name):
    """There are two stages, one of which recomputes; torch skips parameters without gradient."""
    name = f"{USERS}:{name}"
    found = trained(name, (1, 1), 2, "1f1b", recompute=True)
    assert_trained_alike(found, trained_by_torch(name, 2))
    assert {key for ours, _ in found for key in ours} >= {*trained_by_torch(name, 2)[0]}


HOW = [
    ((1, 1, 1, 1), 4, "1f1b", {}),
    ((1, 1), 2, "gpipe", {"recompute": True}),
    ((1, 1), 4, "interleaved", {"chunks": 2, "recompute": True}),
    ((1,) * 8, 8, "1f1b", {}),
    ((1, 1, 1, 1), 4, "zb-h1", {}),
    ((1, 1, 1), 4, "zb-h1", {"recompute": True}),
    ((1, 1, 1, 1), 8, "zb-h2", {}),
    ((1,) * 8, 8, "zb-h2", {"recompute": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "replicas", "micros", "schedule", "how"), rotated(SMALL, HOW, 3))
def test_every_sample_model_matches_torch(name, replicas, micros, schedule, how):
    found = trained(name, replicas, micros, schedule, **how)
    assert_trained_alike(found, trained_by_torch(name, micros))


REPLICATED = [
    ((2, 1), 2, "1f1b", {}),
    ((2, 2), 2, "1f1b", {"zero": 1}),
    ((1, 3, 2), 2, "1f1b", {"recompute": True}),
    ((8,), 1, "none", {}),
    ((2, 1), 2, "zb-h1", {"zero": 1}),
    ((1, 3, 2), 2, "zb-h2", {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "micros", "schedule", "how"),
    rotated([name for name in SMALL if "res" not in name and "dense" not in name], REPLICATED, 4),
)
def test_replicas_of_every_sample_model_match_torch(name, replicas, micros, schedule, how):
    found = trained(name, replicas, micros, schedule, **how)
    assert_trained_alike(found, trained_by_torch(name, micros))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if "res" in name or "dense" in name])
def test_replicas_with_local_batch_norm_match_torch(name):
    """Torch processes the rows of each replica separately; running averages may differ."""
    found = trained(name, (2, 2), 2, "1f1b", zero=1)
    tensors, losses = trained_by_torch(name, 2, replicas=2)
    kept = {key: value for key, value in tensors.items() if "running" not in key}
    assert_trained_alike(found, ({k: v for k, v in kept.items() if "tracked" not in k}, losses))


WIDE = (
    "bert:made(128, 4, 4, 16, 64, vocabulary=500)",
    "resnet:made((1, 1, 1), 16, 64, 10, narrow=32)",
    "unet:made(8, 3, 8, 64)",
    "densenet:made((3, 3), 8, 8, 48, 10)",
    "translation:made(96, 2, 4, 16, 32, vocabulary=500)",
)


PEAKS = [
    ((1,), 1, "none", "none"),
    ((1,), 4, "none", "full"),
    ((1, 1, 1), 4, "1f1b", "none"),
    ((1, 1), 4, "1f1b", "full"),
    ((1, 1), 4, "gpipe", "none"),
    ((2, 1), 2, "1f1b", "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "replicas", "micros", "schedule", "recompute"),
    rotated([f"inputs.partition.{name}" for name in WIDE], PEAKS, 4),
)
def test_peak_memory_of_a_rank_matches_its_plan(name, replicas, micros, schedule, recompute):
    """Counts all tensors of a step, and the moments."""
    for predicted, counted in peaks(name, replicas, micros, schedule, recompute):
        assert predicted == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize("zero", [0, 1])
def test_tied_gradients_are_summed_over_all_owners(zero):
    """b is on ranks 0 and 3, 4, and c on 1, 2 and 3, 4; rank r contributes r + 1."""
    replicas, size = (1, 2, 2), 3

    def rank(mesh, line):
        stage = mesh.coord("p")
        parameters = Parameters(mesh, "float64", zero)
        items = {
            name: parameters.add(name, (size,), Layout(""), completed_last=True)
            for name, stages in OWNERS.items()
            if len(stages) > 1 and stage in stages
        }
        parameters.allocate(seed=0)
        lines = lines_of_owners(OWNERS, ranks_of(replicas), stage, line)
        shared = [
            (comm, [items[name] for name in items if OWNERS[name] == stages])
            for stages, comm in lines.items()
        ]
        buckets = TiedBuckets(parameters, 1e6, shared)
        for item in items.values():
            item.grad += mesh.rank + 1
        buckets.wait()
        return {name: item.grad.tolist() for name, item in items.items()}

    b, c = [1.0 + 4 + 5] * size, [2.0 + 3 + 4 + 5] * size
    assert run_stages(replicas, 4, rank) == [{"b": b}, {"c": c}, {"c": c}] + 2 * [{"b": b, "c": c}]


def test_gradient_norm_counts_a_tied_weight_once():
    """A table of `everything` that counted twice would change the clipping."""
    name = f"{HERE}:everything"
    found = trained(name, (1, 1, 1), 2, "1f1b", zero=0)
    assert_trained_alike(found, trained_by_torch(name, 2))
    owners = [ours for ours, _ in found if "table.weight" in ours]
    assert len(owners) == 2
    np.testing.assert_array_equal(*(ours["table.weight"] for ours in owners))
