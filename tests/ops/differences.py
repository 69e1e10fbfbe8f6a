"""Gradients by finite differences."""

import numpy as np


def difference(function, x, dy, step=1e-6):
    """Return the gradient of sum(dy function(x)) by central differences."""
    gradient = np.empty_like(x)
    for place in np.ndindex(x.shape):
        old = x[place]
        x[place] = old + step
        above = (function(x) * dy).sum()
        x[place] = old - step
        gradient[place] = (above - (function(x) * dy).sum()) / (2 * step)
        x[place] = old
    return gradient
