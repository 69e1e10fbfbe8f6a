"""Write docs/layouts.md and its pictures: python docs/figures/layouts.py"""

from pathlib import Path
from typing import NamedTuple

from hpc3d.analyze.picture.layout_svg import page
from hpc3d.analyze.picture.rank_blocks import RankBlocks
from hpc3d.analyze.report.palette import LAYERS
from hpc3d.predict.simulation.simulator import load_resolved

DOCS = Path(__file__).parents[1]

HEAD = """\
# Layouts in pictures

This page shows what each rank stores in eight typical layouts. After reading this page, you can
draw and read the same picture of your own layout: `python -m hpc3d.layout INPUT.toml` prints it as
text, and `--out layout.svg` also writes an SVG file.

Each box is a rank, and dashed lines separate the devices. A rectangle is the largest matrix of the
embedding, of a Transformer block or of the head, with one color per block. The rank stores the
filled part. The table above the boxes states for each mesh axis whether its ranks store equal
values (replicated) or different values (split). Below the boxes, the blocks of one matrix have the
same colors as the ranks that store them. The option `--machine h100` adds the dashed lines between
hosts.

[parallelism.md](parallelism.md) explains the mesh axes, and [choose-layout.md](choose-layout.md)
shows how to find the fastest layout. The [report](reports.md) of a run contains the picture of its
layout. `python docs/figures/layouts.py` writes this page and its pictures, and a test compares
them.
"""


class Example(NamedTuple):
    """Section of the page: `name` is part of the file name, `keys` follow `hpc3d layout`."""

    name: str
    title: str
    sentence: str
    source: str
    keys: str = ""
    matrix: str = ""

    def command(self) -> str:
        words = [self.source, self.keys, self.matrix and f"--matrix {self.matrix}"]
        return " ".join(["python -m hpc3d.layout", *filter(None, words), "--out layout.svg"])


EXAMPLES = (
    Example(
        "data",
        "Data parallelism",
        "Every rank stores the full model and processes its own part of the batch, so the "
        "gradients are all-reduced in every step.",
        "gpt-dp-vs-pp",
        "--mesh.d 4 --model.layers 4",
    ),
    Example(
        "pipeline",
        "Pipeline parallelism",
        "Every rank stores consecutive layers, and only activations and their gradients are sent "
        "between neighboring stages.",
        "gpt-pp-vs-dp",
        "--mesh.p 4 --model.layers 4",
    ),
    Example(
        "tensor-1d",
        "1-D tensor parallelism",
        "Every rank stores a column block or a row block of each matrix, as in Megatron-LM, and "
        "the activations between the products are replicated.",
        "gpt-serial",
        "--mesh.x 4 --parallel.scheme 1d",
    ),
    Example(
        "tensor-2d",
        "2-D tensor parallelism",
        "The ranks form a grid of 4 x 2 ranks, and every weight matrix is split along both axes "
        "of the grid.",
        "gpt-serial",
        "--mesh.x 4 --mesh.y 2 --parallel.scheme 2d",
    ),
    Example(
        "cube",
        "A cube of 4 x 4 x 4 ranks",
        "Each axis of the cube splits one loop of the matrix product, so all 64 ranks store "
        "different blocks of every weight matrix.",
        "gpt-3d-64",
    ),
    Example(
        "context",
        "Context parallelism",
        "Every rank stores the full model and a part of each sequence, and the keys and values "
        "move around a ring of ranks.",
        "long-context-16",
        "--mesh.c 4",
    ),
    Example(
        "experts",
        "Expert parallelism",
        "Every rank stores two of the eight experts and a replica of all other parameters, and "
        "tokens are sent to the ranks of their experts.",
        "moe-text",
        "--mesh.e 4 --mesh.x 1",
        "layers.1.experts.up.weight",
    ),
    Example(
        "hybrid-sharding",
        "ZeRO 3 with hybrid sharding",
        "Every group of four replicas stores one copy of the parameters, whose rows are split "
        "along axis d, and axis r numbers the groups.",
        "gpt-dp-vs-pp",
        "--mesh.d 8 --parallel.zero 3 --parallel.shard 4 --model.layers 4",
    ),
)


def files() -> dict[str, str]:
    """Return the text of the page and of its pictures, by path in docs."""
    found, sections = {}, [HEAD]
    for each in EXAMPLES:
        blocks = RankBlocks(load_resolved(each.source, each.keys.split()))
        path = f"figures/layout-{each.name}.svg"
        found[path] = page(blocks, LAYERS, each.matrix or None)
        picture = f"![Layers and blocks of each rank: {each.title}]({path})"
        command = f"```bash\n{each.command()}\n```"
        sections.append(f"## {each.title}\n\n{each.sentence}\n\n{command}\n\n{picture}\n")
    return {"layouts.md": "\n".join(sections), **found}


def main() -> None:
    for path, text in files().items():
        (DOCS / path).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
