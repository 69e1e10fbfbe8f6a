"""The best cuboid, which is chosen if the input file does not set the mesh."""

import re
from dataclasses import replace
from math import prod

import pytest

from hpc3d.config.cuboid import received_elements
from hpc3d.config.input_file import Config
from hpc3d.config.load import load
from hpc3d.config.resolve import resolve
from hpc3d.config.size_rules import violations
from hpc3d.model.families import with_epsilon
from tests.config.refused import ON_2_2_2, problems, sized
from tests.elided import elided


def test_wrong_rank_count_error_names_each_factor():
    (said,) = problems(*sized({}, "--mesh.d", "3", *ON_2_2_2), ranks=64)
    line = "mesh: d 3 x x 2 x y 2 x z 2 = 24 ranks, ... 64 ... [mesh], ... 24 ranks"
    assert re.fullmatch(elided(line), said)


def test_axis_unused_by_the_scheme_is_rejected():
    (said,) = problems(*sized({}, *ON_2_2_2, "--parallel.scheme", "2d"))
    assert re.fullmatch(elided("mesh.z = 2: ... z; ... 1"), said)


def test_model_without_a_valid_cuboid_error_names_the_sizes():
    (said,) = problems(*sized({}), ranks=7)
    line = "mesh: no cuboid of 7 ranks ... 3d): with ...=7..., train.batch = 144 must be divisible"
    assert re.match(elided(f"{line} ... = 7 and ... = 7; change the number of ranks"), said)


def test_axis_that_the_scheme_does_not_use_is_no_obstacle():
    (said,) = problems(*sized({}, "--parallel.scheme", "1d"), ranks=7)
    assert re.search(r"with x=7 y=1 z=1, model.heads = 24 must be divisible by mesh.x = 7 ", said)


def test_sizes_that_no_cuboid_can_repair_are_named():
    options = "--mesh.d", "4", "--train.batch", "10", "--model.layers", "3", "--mesh.p", "2"
    assert problems(*sized({}, *options), ranks=16)[0].startswith("train.batch = 10 must be")


@pytest.mark.parametrize("ranks", [*range(1, 71), 100, 128])
def test_default_model_resolves_on_any_number_of_ranks(ranks):
    config = resolve(load(None, []), ranks, default=True)
    assert prod(config.sizes().values()) == ranks
    assert config.model.hidden % config.model.heads == 0
    assert not violations(config, ranks)


def test_modified_default_model_is_not_enlarged():
    changed = load(None, ["--model.hidden", "128"])
    with pytest.raises(ValueError, match=r"mesh: .* 7 ranks"):
        resolve(changed, 7, default=True)
    default = with_epsilon(Config().model)
    assert resolve(load(None, []), 64, default=True).model == default


def test_best_cuboid_has_the_least_communication_volume():
    """The volume is [MK (n-1) + KN (m-1) + MN (k-1)] / P, for the four products of a block."""

    def by_hand(config):
        sizes, hidden = config.sizes(), config.model.hidden
        m, n, k = sizes["x"], sizes["y"], sizes["z"]
        rows, total = config.train.batch * config.model.sequence, 0
        for width, height, (a, b) in (
            (hidden, 3 * hidden, (n, k)),
            (hidden, hidden, (k, n)),
            (hidden, 4 * hidden, (n, k)),
            (4 * hidden, hidden, (k, n)),
        ):
            total += rows * width * (a - 1) + width * height * (m - 1) + rows * height * (b - 1)
        return total / (m * n * k)

    def on(x, y, z):
        return resolve(load(None, sized({"--mesh.x": x, "--mesh.y": y, "--mesh.z": z})), x * y * z)

    best = resolve(load(None, sized({})), 8)
    cuboids = [on(x, y, 8 // (x * y)) for x in (1, 2, 4, 8) for y in (1, 2, 4, 8) if x * y <= 8]
    assert by_hand(best) == min(map(by_hand, cuboids)) < max(map(by_hand, cuboids))
    assert [received_elements(config) for config in cuboids] == pytest.approx(
        list(map(by_hand, cuboids))
    )


def test_expert_traffic_counts_capacity_slots_not_routed_tokens():
    """Along y: X of qkv and up, Y of proj and down, and a router's weights. Two experts have 9
    slots each for 12 tokens, so 3/2 rows per token; counting choices would give 2."""
    words = "--model.experts 2 --model.top_k 2 --model.capacity 0.75 --model.sequence 12"
    sizes = sized({"--mesh.x": 1, "--mesh.y": 2, "--mesh.z": 1})
    config = resolve(load(None, [*sizes, *words.split()]), 2)
    hidden, rows = config.model.hidden, config.train.batch * 12
    words = 2 * rows * hidden + 2 * 1.5 * rows * hidden + 2 * hidden
    assert received_elements(config) == words / 2
    turned = replace(config, mesh=replace(config.mesh, x=2, y=1))  # here the weights move
    weights = (4 + 2 * 8) * hidden**2 + 2 * hidden
    assert received_elements(turned) == weights / 2
    assert received_elements(turned, 2) == (weights - 8 * hidden**2) / 2
