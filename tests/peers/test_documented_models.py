"""The models of docs/public-models.md: each file and command, as printed on the page."""

import re

import numpy as np
import pytest

pytest.importorskip("transformers", reason="make test-peers installs it")

from tests.documented.pages import SHOWN_FILE, commands
from tests.documented.scripts import output_of, script
from tests.mpi import ROOT
from tests.strided import strided

PAGE = "docs/public-models.md"
SECTION = re.compile(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"```text\n(.*?)```", re.DOTALL)
SECTIONS = {
    name: text
    for name, text in SECTION.findall((ROOT / PAGE).read_text(encoding="utf-8"))
    if SHOWN_FILE.search(text)
}
MOST_LINES, SECONDS = 10, 250

# A model with the interface of nanoGPT's model.py, which is not installed.
NANO_GPT = """
from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass
class GPTConfig:
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int


class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.n_embd
        self.words = torch.nn.Embedding(config.vocab_size, width)
        self.positions = torch.nn.Embedding(config.block_size, width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, config.n_head, 4 * width, batch_first=True)
            for _ in range(config.n_layer)
        )
        self.head = torch.nn.Linear(width, config.vocab_size, bias=False)
        self.head.weight = self.words.weight
        print("number of parameters:", sum(each.numel() for each in self.parameters()))

    def forward(self, idx, targets=None):
        x = self.words(idx) + self.positions(torch.arange(idx.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, functional.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
"""


def nano_gpt(folder):
    """Write the files of a clone of nanoGPT that the page uses."""
    (folder / "model.py").write_text(NANO_GPT, encoding="utf-8")
    text = np.random.default_rng(0).integers(65, size=2000).astype(np.uint16)
    path = folder / "data" / "shakespeare_char" / "train.bin"
    path.parent.mkdir(parents=True)
    text.tofile(path)


def missing(shown, printed):
    """Return the lines of `shown` that are not in `printed`; numbers may differ."""
    patterns = {
        line: re.sub(r"\d+(\\\.\d+)?", lambda _: r"\d+(\.\d+)?", re.escape(line.strip()))
        for line in shown.splitlines()
    }
    return [line for line, pattern in patterns.items() if not re.search(pattern, printed)]


@pytest.mark.parametrize("name", strided(SECTIONS, 99, 99))
def test_documented_model_trains_as_printed(name, tmp_path):
    ((file, code),) = SHOWN_FILE.findall(SECTIONS[name])
    assert len([line for line in code.splitlines() if line]) <= MOST_LINES
    (tmp_path / file).write_text(code, encoding="utf-8")
    if name == "nanoGPT":
        nano_gpt(tmp_path)
    typed = [each.text for each in commands(PAGE, SECTIONS[name]) if "hpc3d" in each.text]
    assert len(typed) == 2
    printed = output_of(script([(text, 0) for text in typed]), tmp_path, SECONDS)
    (shown,) = OUTPUT.findall(SECTIONS[name])
    assert not missing(shown, printed)
