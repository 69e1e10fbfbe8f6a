"""A segment is complete or absent, and is written without libraries."""

import subprocess
import sys

import numpy as np
import pytest

from tests.trace.small import write


def test_segment_is_complete_or_absent(tmp_path, monkeypatch):
    def fill_the_disk(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, 0, 0)
    assert list((tmp_path / "trace").iterdir()) == []


def test_recording_requires_no_h5py():
    program = "import hpc3d.trace, hpc3d.trace.segment, sys; print('h5py' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
