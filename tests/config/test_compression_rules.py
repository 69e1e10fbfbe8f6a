"""Settings of gradient compression that are rejected, and limits that are accepted."""

import re

import pytest

from tests.config.refused import problems
from tests.elided import elided

POWERSGD, TOP_K = (f"--parallel.compression {kind}" for kind in ("powersgd", "top-k"))
# Options, and the line.
WRONG = {
    f"{POWERSGD} --parallel.zero 2": (
        "parallel.compression = powersgd: parallel.zero = 2 ... use parallel.zero = 0 or 1"
    ),
    f"{TOP_K} --parallel.zero 1 --parallel.local_steps 8": (
        "parallel.compression = top-k: ... shards the outer gradients; use parallel.zero = 0"
    ),
    f"{TOP_K} --parallel.zero 3": "parallel.compression = top-k: parallel.zero = 3 ...",
    f"{TOP_K} --train.backend cupy --train.dtype float16": (
        "parallel.compression = top-k: ... loss scale ... use train.dtype = bfloat16 or float32"
    ),
    "--parallel.compression_rank 8": (
        "parallel.compression_rank = 8: ... parallel.compression = powersgd; leave it out, ..."
    ),
    f"{POWERSGD} --parallel.compression_share 0.1": (
        "parallel.compression_share = 0.1: ... parallel.compression = top-k; leave it out, ..."
    ),
    f"{POWERSGD} --parallel.compression_rank 0": (
        "parallel.compression_rank = 0: must be at least 1..."
    ),
    f"{TOP_K} --parallel.compression_share 0": "parallel.compression_share = 0.0: must be ...",
    f"{TOP_K} --parallel.compression_share 1.5": "parallel.compression_share = 1.5: must be ...",
    f"{TOP_K} --parallel.compression_share nan": "parallel.compression_share = nan: must be ...",
}


@pytest.mark.parametrize("options", WRONG)
def test_invalid_compression_settings_are_rejected_in_one_line(options):
    (line,) = problems("--mesh.d", "2", *options.split(), ranks=2)
    assert re.match(elided(WRONG[options]), line)
