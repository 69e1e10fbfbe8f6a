"""A small text, and where its tokens go."""

import pytest

from hpc3d.data.tokenizer import train_bpe
from tests.data.prepared import TEXT


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def output(tmp_path):
    return tmp_path / "tokens.h5"


@pytest.fixture(scope="module")
def bpe():
    pytest.importorskip("tokenizers")
    return train_bpe([TEXT.encode()], 275)
