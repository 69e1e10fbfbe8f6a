"""The columns of qkv per key head, in the layout of hpc3d/ops/attention.py."""

import numpy as np


def by_head(qkv, heads, form):
    """Reshape qkv [rows, heads*(g+2)*D] to [rows, heads, g + 2, D]: g queries, key, value."""
    rows, (width, g) = len(qkv), form[:2]
    if g == 1:
        return qkv.reshape(rows, heads, 3, width)
    q, k, v = np.split(qkv, [heads * g * width, heads * (g + 1) * width], axis=1)
    parts = (each.reshape(rows, heads, -1, width) for each in (q, k, v))
    return np.concatenate([*parts], axis=2)
