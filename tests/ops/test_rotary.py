"""Rotary positions, compared with complex numbers, and their frequencies, compared with Llama 3's
published formula."""

from math import log, pi

import numpy as np
import pytest
import torch

from hpc3d.ops.attention import HeadForm
from hpc3d.ops.rotary import Rotation, rotary_table, rotate
from tests.ops.by_head import by_head
from tests.ops.differences import difference

RNG = np.random.default_rng(7)
BATCH, HEADS, SEQUENCE = 2, 3, 5


def turned(x, base, form, share):
    """Return q and k of qkv by head, with each pair (a, b) = a + ib times exp(i angle)."""
    parts = torch.tensor(by_head(x, HEADS, form).reshape(BATCH, SEQUENCE, HEADS, -1, form.width))
    rotated = int(form.width * share)
    i = torch.arange(rotated // 2, dtype=torch.float64)
    positions = torch.arange(SEQUENCE, dtype=torch.float64)
    angles = torch.outer(positions, base ** (-2 * i / rotated))
    a, b = parts[:, :, :, :-1, :rotated].chunk(2, dim=-1)
    pairs = torch.complex(a, b) * torch.exp(1j * angles)[:, None, None]
    parts[:, :, :, :-1, :rotated] = torch.cat([pairs.real, pairs.imag], -1)
    return parts.flatten(0, 1).numpy()


@pytest.mark.parametrize(
    ("form", "share"),
    [(HeadForm(2), 1.0), (HeadForm(8), 1.0), (HeadForm(6, 3), 1.0), (HeadForm(8, 3), 0.5)],
    ids=str,
)
def test_rotary_embedding_rotates_queries_and_keys_but_not_values(form, share):
    rotation = Rotation(base=500.0, share=share)
    x, dy = RNG.normal(size=(2, BATCH * SEQUENCE, HEADS * form.columns))
    table = rotary_table(rotation, SEQUENCE, form.width, np.dtype(np.float64))
    got = rotate(x.copy(), table, form)
    found, before = by_head(got, HEADS, form), by_head(x, HEADS, form)
    np.testing.assert_allclose(found, turned(x, rotation.base, form, share), atol=1e-13)
    np.testing.assert_array_equal(found[:, :, -1], before[:, :, -1])
    np.testing.assert_allclose(
        rotate(dy.copy(), table, form, sign=-1),
        difference(lambda each: rotate(each.copy(), table, form), x, dy),
        atol=1e-7,
    )


def published(rotation, width):
    """Return the frequencies of a head, each by the branch for its wavelength."""
    found = []
    for i in range(width // 2):
        f = rotation.base ** (-2 * i / width)
        wavelength = 2 * pi / f
        if wavelength < rotation.original / rotation.high:
            found.append(f)
        elif wavelength > rotation.original / rotation.low:
            found.append(f / rotation.factor)
        else:
            smooth = rotation.original / wavelength - rotation.low
            smooth /= rotation.high - rotation.low
            found.append((1 - smooth) * f / rotation.factor + smooth * f)
    return found


@pytest.mark.parametrize("width", [2, 64, 128])
@pytest.mark.parametrize(
    "rotation",
    [
        Rotation(),
        Rotation(500000.0),
        Rotation(500000.0, factor=8.0),
        Rotation(500000.0, 32.0, 1.0, 4.0, 8192),
        Rotation(10000.0, 2.0, 0.5, 8.0, 100),
    ],
    ids=str,
)
def test_rotary_frequencies_match_the_published_formula(rotation, width):
    found = rotation.frequencies(width)
    np.testing.assert_allclose(found, published(rotation, width), rtol=1e-12)
    if rotation.factor > 1 and width > 2:
        kept = found * rotation.base ** (np.arange(0, width, 2) / width)
        between = (kept < 1 - 1e-9) & (kept > 1 / rotation.factor + 1e-9)
        assert kept[0] == 1 and between.any() and kept[-1] < 1 / rotation.factor + 1e-9


@pytest.mark.parametrize(("sequence", "divisors"), [(7, [1, 2, 4]), (8, [3, 5, 9])])
def test_longrope_divides_each_frequency_by_the_divisor_for_the_sequence_length(
    sequence, divisors
):
    how = {"short": (1.0, 2.0, 4.0), "long": (3.0, 5.0, 9.0), "share": 0.5, "sequence": sequence}
    rotation = Rotation(64.0, factor=5.0, original=7, type="longrope", **how)
    expected = 64.0 ** (-np.arange(3) / 3) / divisors
    np.testing.assert_allclose(rotation.frequencies(12), expected, rtol=1e-12)
    assert rotation.amplitude == pytest.approx((1 + log(5) / log(7)) ** 0.5, rel=1e-12)
    assert rotation._replace(factor=1.0).amplitude == 1
    np.testing.assert_allclose(rotation._replace(factor=1.0).frequencies(12), expected)


def test_rotary_table_has_the_angle_of_every_position():
    rotation = Rotation(100.0)
    table = rotary_table(rotation, 4, 6, np.dtype(np.float32))
    angles = [[position * 100 ** (-2 * i / 6) for i in range(3)] for position in range(4)]
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, [np.cos(angles), np.sin(angles)], atol=1e-7)
