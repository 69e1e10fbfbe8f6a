"""Standard input is read to its end, also under MPI launchers."""

import os

import pytest

from hpc3d.generation import standard_input as module
from hpc3d.generation.standard_input import standard_input


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr(module, "_PAUSE", 0.05)
    monkeypatch.setattr(module, "_NOTHING", 0.1)
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_standard_input_is_read_to_its_end(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)) * 1000)
    for launched in (False, True):
        with path.open("rb") as file:
            assert standard_input(launched, file.fileno()) == path.read_bytes()


def test_launcher_may_keep_the_pipe_open(pipe):
    reading, writing = pipe
    os.write(writing, b"a text")
    assert standard_input(True, reading) == b"a text"


def test_empty_open_pipe_raises_instead_of_blocking(pipe):
    with pytest.raises(ValueError, match="--prompt"):
        standard_input(True, pipe[0])
