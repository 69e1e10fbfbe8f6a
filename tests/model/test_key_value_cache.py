"""Attention with a key-value cache matches attention on full sequences, also with RoPE."""

import numpy as np
import pytest

from hpc3d.comm.threads import run
from hpc3d.model.core_attention import CoreAttention
from hpc3d.model.key_value_cache import CachedAttention, KeptPositions
from hpc3d.model.microbatch import Microbatch
from hpc3d.training.trainer import spec_of
from tests.pipeline.mixes import config_of


def micro_of(sequences, count):
    tokens = np.zeros((sequences, count), int)
    return Microbatch(0, 0, tokens, tokens, 1.0)


@pytest.mark.parametrize(
    "kind", ["kind=gpt2", "kind=llama kv_heads=4 rope_theta=20.0", "window=1", "window=3"]
)
def test_cached_attention_in_chunks_matches_full_attention(kind):
    config = config_of(f"schedule=none microbatches=1 batch=2 sequence=6 {kind}")
    spec = spec_of(config, 29)
    qkv = np.random.default_rng(2).normal(size=(2, 6, spec.sizes.qkv))

    def rank(mesh):
        rows = qkv.reshape(12, -1).copy()
        window, kept = spec.sizes.window_of(0), KeptPositions(6)
        whole, _ = CoreAttention(mesh, "core", spec, window).forward(rows, micro_of(2, 6))
        cached, found = CachedAttention(mesh, spec, kept, window), []
        for part in (slice(0, 3), slice(3, 4), slice(4, 6)):
            count = part.stop - part.start
            given = qkv[:, part].reshape(2 * count, -1)
            found.append(cached.forward(given, micro_of(2, count))[0].reshape(2, count, -1))
            kept.length += count
        return np.concatenate(found, 1), whole.reshape(2, 6, -1)

    np.testing.assert_allclose(*run({}, rank)[0], rtol=0, atol=1e-12)
