"""The trace of 1,024 ranks and 10 steps is analyzed on a small machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.analyze.synthetic import large


@pytest.mark.slow
def test_trace_of_five_million_events_is_analyzed_within_time_and_memory_limits(tmp_path):
    path = tmp_path / "trace.h5"
    large(path, side=32, steps=10, slots=244).close()
    command = [sys.executable, "-m", "tests.analyze.on_large", path]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["events"] == 4_997_120
    assert sum(found["seconds"].values()) < 120, found["seconds"]
    assert found["peak_bytes"] < 1.5e9
