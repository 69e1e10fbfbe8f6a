"""Files that must exist before the first command of a page."""

import json

import numpy as np

from tests.data.prepared import TEXT, nano
from tests.data.test_sources import megatron
from tests.documented.pages import files_on

# Of 2 steps on 2 ranks; divides over 8 and 12.
SMALL = "--model.hidden 144 --model.heads 24 --train.batch 24 --train.steps 2 --checkpoint.every 1"
TRAIN = f"mpirun -np 2 python -m hpc3d.train {SMALL}"
EXPORT = "python -m hpc3d.checkpoint export results/RUN -o"
PARTITION = "python -m hpc3d.partition inputs.partition.mlp:regression"
MODULE = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8)))
        self.first, self.last = torch.nn.Linear(8, 1024), torch.nn.Linear(1024, 1)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.last(self.layers(self.first(x))), y)

def factory():
    return Net(), (torch.zeros(256, 8), torch.zeros(256, 1))

def batch(step):
    return torch.full((256, 8), 1.0 + step), torch.ones(256, 1)
"""

# Commands that are run before those of a page.
COMMANDS = {
    "docs/data.md": [
        f"{EXPORT} gpt2-folder && rm -r results",
        "hpc3d prepare data/shakespeare_char/train.bin -o openwebtext.h5",
    ],
    "docs/evaluate.md": [f"{EXPORT} theirs"],
    "docs/generation.md": [f"{EXPORT} exported"],
    "docs/partition.md": [f"{PARTITION} --ranks 2 -o other-plan.json"],
    "docs/reports.md": [
        f"{TRAIN} --name {name} && mv results/{name}-2* results/{name}"
        for name in ("RUN-1D", "RUN-3D")
    ],
}


def files_of(page, folder):
    """Write the files of a page into a folder."""
    for name, write in FILES.get(page, {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)


def _text(text):
    return lambda path: path.write_text(text, encoding="utf-8")


def _lines(key):
    return _text("".join(json.dumps({key: text}) + "\n" for text in TEXT.split(";")))


def _nano(path):
    nano(path.parent, "O " + TEXT * 3)


def _validation(path):
    """Write the ids of train.bin in reverse order."""
    np.fromfile(path.with_name("train.bin"), np.uint16)[::-1].tofile(path)


def _parquet(path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXT.split(";")}), path)


def _indexed(path):
    """Write NAME.bin and NAME.idx of Megatron-LM."""
    megatron(path.parent, [[[1, 2, 3]], [[4, 5], [6]]])
    for suffix in (".bin", ".idx"):
        (path.parent / "a").with_suffix(suffix).rename(path.with_suffix(suffix))


GRAPH = {
    "nodes": [{"id": n, "forward": 1, "backward": 2} for n in range(8)],
    "edges": [{"from": n, "to": n + 1, "bytes": 1e7} for n in range(7)],
}
FILES = {
    "docs/data.md": {
        "book.txt": _text(TEXT * 40),
        "more/more.txt": _text(TEXT * 40),
        "data/shakespeare_char/train.bin": _nano,
        "data/shakespeare_char/val.bin": _validation,
        "my-gpt2_text_document.bin": _indexed,
        "part-0.jsonl": _lines("body"),
        "part-1.jsonl": _lines("body"),
        "train-00000.parquet": _parquet,
        "mine.jsonl": _lines("text"),
        "other.txt": _text(TEXT),
    },
    "docs/evaluate.md": {"held-out.txt": _text(TEXT), "other.txt": _text(TEXT * 3)},
    "docs/evaluation.md": {"web.txt": _text(TEXT), "code.txt": _text(TEXT * 3)},
    "docs/generation.md": {"text.txt": _text("The function")},
    "docs/partition-graph.md": {"COSTS.json": _text(json.dumps(GRAPH))},
    "docs/partition.md": {
        "model.py": _text(MODULE),
        "gpt2.py": _text(files_on("docs/public-models.md")["gpt2.py"]),
    },
    "docs/sweep.md": {"study.toml": _text(files_on("docs/sweep.md")["study.toml"])},
}
