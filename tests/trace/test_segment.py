"""A segment is whole or absent, and needs no library to be written."""

import subprocess
import sys

import numpy as np
import pytest

from hpc3d.trace.segment import replacing
from tests.trace.small import write


def test_a_segment_is_whole_or_absent(tmp_path, monkeypatch):
    def fill_the_disk(file, **_):
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez", fill_the_disk)
    with pytest.raises(OSError, match="disk full"):
        write(tmp_path, 0, 0)
    assert list((tmp_path / "trace").iterdir()) == []


def test_a_broken_write_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing(path) as temporary:
        temporary.write_text("half")
        raise OSError("disk full")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_recording_rank_needs_no_h5py():
    program = "import hpc3d.trace, hpc3d.trace.segment, sys; print('h5py' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
