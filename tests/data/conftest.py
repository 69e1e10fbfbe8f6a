"""A short text, and a folder for its tokens."""

import pytest

from hpc3d import prepare
from hpc3d.data.token_file import TokenFile, tokenizer_of
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


@pytest.fixture
def prepared(tmp_path, capsys):
    """Return the ids and the tokenizer of a prepared token file, or the error message."""

    def make(name, *words):
        out = tmp_path / "tokens.h5"
        out.unlink(missing_ok=True)
        code = prepare.main([str(tmp_path / name), "-o", str(out), *words])
        if code:
            error = capsys.readouterr().err
            assert code == 2 and error.count("\n") == 1, error
            assert not out.exists()
            return error
        with TokenFile(out) as tokens:
            return tokens.read(0, len(tokens)).tolist(), tokenizer_of(out), tokens.documents

    return make
