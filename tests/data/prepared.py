"""Calls of the command `prepare`, and their results."""

import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np

from hpc3d import prepare
from hpc3d.data.token_file import open_tokens
from tests.runs import ended

ROOT = Path(__file__).parents[2]
TEXT = "the cat sat on the mat; the dog sat on the log; größer\n" * 40


def python(*words, **options):
    """Run Python in the repository, as users do."""
    line = [sys.executable, *map(str, words)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, timeout=250, check=False, **options)


def call(capsys, *words):
    """Run the command in this process; return exit code, lines on stdout, and text on stderr."""
    code = ended(prepare.main, *words)
    printed = capsys.readouterr()
    return code, printed.out.splitlines(), printed.err


def row(path, tokenizer="byte"):
    with open_tokens(path, tokenizer) as tokens:
        return tokens.read(0, len(tokens))


def nano(folder, text):
    """Write train.bin and meta.pkl like nanoGPT's shakespeare_char/prepare.py."""
    letters = sorted({*text})
    stoi = {letter: number for number, letter in enumerate(letters)}
    itos = dict(enumerate(letters))
    np.array([stoi[letter] for letter in text], np.uint16).tofile(folder / "train.bin")
    meta = {"vocab_size": len(letters), "itos": itos, "stoi": stoi}
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return [stoi[letter] for letter in text]
