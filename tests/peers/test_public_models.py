"""Public models of Hugging Face transformers, trained on two and four ranks and compared with
torch, or rejected with a message that names the line of the model."""

import gc
from typing import NamedTuple

import pytest

pytest.importorskip("transformers", reason="make test-peers installs it")

from tests.mpi import ROOT
from tests.peers.public_models import MODELS, factory_of
from tests.peers.trained_models import (
    differences,
    in_double,
    normalizes_batches,
    prepared,
    trained_by_torch,
    trained_on_ranks,
    verify,
)
from tests.strided import daily

pytestmark = [pytest.mark.slow, daily]


@pytest.fixture(scope="module", autouse=True)
def seldom_collected():
    """Run the garbage collector as rarely as `hpc3d.partition`: programs are many live objects."""
    before = gc.get_threshold()
    gc.set_threshold(200_000)
    yield
    gc.set_threshold(*before)
    gc.collect()


class Refusal(NamedTuple):
    """Part of the expected message, and the reason that docs/public-models.md states."""

    message: str
    reason: str


NOT_SPLIT = ("resnet", "regnet", "poolformer")
LAYER_DROP = "LayerDrop skips layers at random"
REFUSED = {
    "electra": Refusal(r"modeling_electra\.py:\d+", "boolean indexing selects a number of rows"),
    "longformer": Refusal(r"modeling_longformer\.py:\d+", "the control flow depends on the mask"),
    "clip": Refusal(r"modeling_clip\.py:\d+", "the contrastive loss relates all samples"),
    "wav2vec2": Refusal(r"modeling_wav2vec2\.py:\d+", "an `if` checks the labels"),
    "wav2vec2_classes": Refusal(r"modeling_wav2vec2\.py:\d+", LAYER_DROP),
    "informer": Refusal(r"modeling_informer\.py:\d+", LAYER_DROP),
    "time_series_all_layers": Refusal(
        r"time_series_transformer\.py:\d+", "values are scaled by statistics of the batch"
    ),
}


@pytest.mark.parametrize("name", [name for name in MODELS if name not in REFUSED])
def test_public_model_trains_as_in_torch(name):
    """Train on two stages with replicas, and on two stages of two tensor-parallel ranks.

    A model with BatchNorm has one replica per stage, because each replica has its own statistics.
    """
    with in_double():
        case = prepared(factory_of(name))
        verify(case)
        expected = trained_by_torch(case)
        plans = [((1, 1), 1), ((1, 1, 1, 1) if normalizes_batches(case) else (2, 2), 1)]
        plans += [((1, 1), 2)] if name not in NOT_SPLIT else []
        for replicas, ways in plans:
            found = trained_on_ranks(case, replicas, ways)
            loss, tensors = differences(case, found, expected)
            assert loss < 1e-9 and tensors < 1e-9, (replicas, ways)


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_model_without_pairs_of_linear_layers_is_not_split(name):
    case = prepared(factory_of(name))
    with pytest.raises(ValueError, match="no linear layers that can be split over 2 ranks"):
        trained_on_ranks(case, (1, 1), ways=2)


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_of_a_public_model_is_one_line(name):
    with in_double(), pytest.raises(ValueError, match=REFUSED[name].message) as refused:
        trained_on_ranks(prepared(factory_of(name)), (1, 1))
    assert "\n" not in str(refused.value)


def row(name):
    """Return the row of a model in the table of docs/public-models.md."""
    found = f"refused: {REFUSED[name].reason}" if name in REFUSED else "equal to torch"
    return f"| {name.replace('_', '-')} | {MODELS[name].kind} | {found} |"


def test_documented_table_lists_every_public_model():
    lines = (ROOT / "docs" / "public-models.md").read_text(encoding="utf-8").splitlines()
    first = lines.index("| model | class of transformers | result |") + 2
    assert lines[first:] == [*map(row, MODELS)]
