"""Sizes, products and names of a model."""

from collections import Counter
from dataclasses import replace

import pytest

from hpc3d.model.spec import Experts, ModelSizes, WeightProduct
from hpc3d.ops.attention import HeadForm


def test_widths_of_gpt_2():
    sizes = ModelSizes(layers=2, hidden=24, heads=4, sequence=8, vocabulary=10)
    assert (sizes.form, sizes.qkv, sizes.ffn) == (HeadForm(6, 1), 72, 96)


def test_widths_of_llama():
    sizes = ModelSizes(2, hidden=24, heads=4, sequence=8, vocabulary=10, kv_heads=2, ffn=64)
    assert (sizes.form, sizes.qkv, sizes.ffn) == (HeadForm(6, 2), 48, 64)


@pytest.mark.parametrize("window", [0, 4, 8])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_windows_are_counted_without_a_loop_over_the_blocks(window, every):
    sizes = ModelSizes(7, 24, heads=4, sequence=8, vocabulary=10, window=window)
    sizes = replace(sizes, global_every=every)
    assert sizes.windows() == Counter(map(sizes.window_of, range(7)))


def test_weight_product_flops_count_its_rows():
    """Two FLOPs per element of W and row; experts have more or fewer rows than tokens."""
    assert WeightProduct("up", 3, 5).flops == 30 and WeightProduct("up", 3, 5).weights == 15
    assert WeightProduct("expert", 3, 5, rows=2).flops == 60


def test_active_weights_count_only_the_selected_experts():
    product = WeightProduct("experts.up", 3, 5, rows=2, experts=8)
    assert (product.weights, product.active, product.flops) == (120, 30, 60)
    assert product._replace(slots=3).computed == 45


def test_expert_slots_per_token():
    assert Experts(8, top_k=2).slots_of_token(64) == 8 * 20 / 64
    assert Experts(128).slots_of_token(64) == 2  # one slot each
    assert Experts(4, capacity=0).slots_of_token(64) == 1.25
    assert Experts(4, top_k=4, capacity=0).slots_of_token(64) == 4


@pytest.mark.parametrize(
    ("experts", "slots"),
    [
        (Experts(8, capacity=1.0), 8),
        (Experts(8, top_k=2, capacity=1.25), 20),
        (Experts(6, capacity=1.0), 11),  # 10.7
        (Experts(64, capacity=1.1), 2),  # 1.1
        (Experts(32, top_k=5, capacity=1.1), 11),  # 11 exactly, but 11.000000000000002 in float64
        (Experts(2, top_k=2, capacity=4.0), 64),  # no more than tokens
        (Experts(8, capacity=1e-9), 1),
        (Experts(8, capacity=0), 10),  # for up to 1.25 times the mean load of 8
    ],
)
def test_expert_slots_for_64_tokens(experts, slots):
    assert experts.slots(64) == slots


@pytest.mark.parametrize(("load", "slots"), [(0, 10), (10, 10), (11, 20), (21, 40), (41, 64)])
def test_slots_without_a_capacity_limit_suffice_for_the_largest_load(load, slots):
    assert Experts(8, capacity=0).sufficient_slots(64, load) == slots


def test_every_nth_block_is_a_mixture():
    def sizes(experts):
        return ModelSizes(7, 24, 4, 6, 10, experts=experts)

    for every, mixtures in ((1, [*range(7)]), (2, [1, 3, 5]), (3, [2, 5]), (7, [6])):
        model = sizes(Experts(4, every=every))
        assert [layer for layer in range(7) if model.mixes(layer)] == mixtures
        assert model.blocks() == {False: 7 - len(mixtures), True: len(mixtures)}
    assert not sizes(None).mixes(6) and sizes(None).blocks() == {False: 7, True: 0}
