"""Sizes, products and names."""

from hpc3d.model.spec import ModelSizes, WeightProduct


def test_widths_of_gpt_2():
    sizes = ModelSizes(layers=2, hidden=24, heads=4, sequence=8, vocabulary=10)
    assert (sizes.form, sizes.qkv, sizes.ffn) == ((6, 1), 72, 96)


def test_widths_of_llama():
    sizes = ModelSizes(2, hidden=24, heads=4, sequence=8, vocabulary=10, kv_heads=2, ffn=64)
    assert (sizes.form, sizes.qkv, sizes.ffn) == ((6, 2), 48, 64)


def test_a_product_counts_its_rows():
    """Two operations an element of W and row; experts have more or fewer rows than tokens."""
    assert WeightProduct("up", 3, 5).flops == 30 and WeightProduct("up", 3, 5).weights == 15
    assert WeightProduct("expert", 3, 5, rows=2).flops == 60
