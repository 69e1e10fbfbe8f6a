"""The layout of ranks for text generation, derived from the training layout."""

import re

import pytest

from hpc3d.generation.tensor_layout import described, laid_out
from tests.elided import elided
from tests.pipeline.mixes import config_of

RUN = "x=2 y=2 z=2 schedule=none microbatches=2 scheme=3d dropout=0.25"
STAGES = "p=2 d=2 x=2 schedule=1f1b microbatches=2 zero=3 scheme=1d"


def mesh_of(config):
    return {axis: size for axis, size in config.sizes().items() if size > 1}


def test_layout_of_the_run_is_kept_on_the_same_number_of_ranks():
    config = laid_out(config_of(RUN), [], 8, 1)
    assert mesh_of(config) == {"x": 2, "y": 2, "z": 2}
    assert config.parallel.scheme == "3d" and config.train.batch == 4
    assert (config.model.sequence, config.model.dropout) == (3, 0.0)
    assert described(config) == "gpt2 on x=2 y=2 z=2, scheme 3d, float64"


def test_best_cuboid_for_generation_moves_no_weights():
    """With one row per sequence, W would be expensive to gather, so m is not sharded."""
    stages = STAGES.replace("1d", "3d")
    for line, ranks in [(RUN, 4), (RUN, 1), (stages, 8), (f"{RUN} sequence=4096", 4)]:
        config = laid_out(config_of(line), [], ranks, 1)
        assert config.grid().size == ranks
        assert config.mesh.x == config.mesh.p == config.mesh.d == 1


def test_pipeline_and_data_ranks_become_tensor_ranks():
    config = laid_out(config_of(STAGES), [], 4, 1)
    assert mesh_of(config) == {"x": 4}
    parallel = config.parallel
    assert (parallel.scheme, parallel.zero, parallel.microbatches) == ("1d", 0, 1)


def test_generation_with_experts_never_drops_tokens():
    mixture = "p=2 e=2 x=2 schedule=1f1b microbatches=2 experts=4 top_k=2 capacity=1.5"
    words = [word for axis in "xyz" for word in (f"--mesh.{axis}", "2")]
    config = laid_out(config_of(mixture), words, 8, 1)
    assert config.mesh.e == config.mesh.p == 1 and config.train.batch == 8
    assert (config.model.capacity, config.model.experts) == (0.0, 4)
    assert laid_out(config_of(RUN), [], 8, 1).model.capacity == 1.25  # of no meaning


def test_options_select_another_scheme_and_mesh():
    words = ["--parallel.scheme", "2d-summa", "--mesh.x", "2", "--mesh.y", "4"]
    config = laid_out(config_of(RUN), words, 8, 3)
    assert mesh_of(config) == {"x": 2, "y": 4}
    assert config.parallel.scheme == "2d-summa" and config.train.batch == 8  # logits Y[m_xy]


def test_custom_split_is_kept_unless_a_scheme_is_given():
    line = 'x=2 y=2 schedule=none microbatches=2 split=\'{m="x",n="y"}\''
    assert laid_out(config_of(line), [], 4, 1).parallel.split == {"m": "x", "n": "y"}
    words = ["--parallel.scheme", "1d", "--mesh.x", "4"]
    assert laid_out(config_of(line), words, 4, 1).parallel.split is None


@pytest.mark.parametrize("axis", ["p", "d", "c", "e"])
def test_non_tensor_axes_are_rejected_with_a_fix(axis):
    with pytest.raises(ValueError, match=elided(f"mesh.{axis} = 2: ... give --mesh.{axis} 1")):
        laid_out(config_of(RUN), [f"--mesh.{axis}", "2"], 2, 1)


def test_all_problems_of_a_generation_layout_are_reported():
    words = ["--mesh.p", "2", "--mesh.x", "0", "--parallel.zero", "7"]
    with pytest.raises(ValueError) as refused:
        laid_out(config_of(RUN), words, 2, 1)
    keys = [re.match(r"[\w.]+", line)[0] for line in str(refused.value).splitlines()]
    assert keys == ["parallel.zero", "mesh.x", "mesh.p"]


@pytest.mark.parametrize(
    ("words", "ranks", "line"),
    [
        (["--mesh.x", "2"], 3, "mesh: x 2 = 2 ranks, but the job has 3"),
        (["--mesh.y", "5"], 5, "model.heads = 12 must be divisible by mesh.y = 5"),
        (["--mesh.x", "-1"], 2, "mesh.x = -1: "),
        (["--parallel.scheme", "4d"], 2, "parallel.scheme: "),
        ([], 7, "mesh: no cuboid of 7 ranks"),
    ],
)
def test_invalid_generation_layout_is_rejected(words, ranks, line):
    with pytest.raises(ValueError, match=elided(line)):
        laid_out(config_of(RUN), words, ranks, 1)
