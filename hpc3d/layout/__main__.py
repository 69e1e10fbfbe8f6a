"""Draw a layout: the layers and matrix blocks of each rank.

python -m hpc3d.layout gpt-4d-64
python -m hpc3d.layout gpt-3d-64 --out layout.svg --matrix layers.0.qkv.weight
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hpc3d.config.argument_types import number_of_ranks
from hpc3d.config.package_data import input_of
from hpc3d.console.command_line import Parser, run
from hpc3d.console.sanitize import all_results, sanitized

_TEXT = """\
Draw a layout: what each rank stores, and what is split or replicated along each mesh axis. The
command prints the picture as text; --out also writes it as an SVG file, with one box per rank, one
color per layer, and dashed lines between devices and between hosts. Up to 64 ranks are all drawn.
Of more ranks, one example per mesh axis is drawn. Nothing is trained.

Keys of the input file can be given as options (--mesh.x 4)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 for invalid input."""
    options, overrides = parser().parse_known_args(argv)
    return run("layout", lambda: _layout(options, overrides))


def parser() -> Parser:
    """Return the command-line parser."""
    usage = "%(prog)s INPUT.toml|RUN_DIR [options] [--section.key value ...]"
    parser = Parser("layout", _TEXT, usage=usage)
    add = parser.add_argument
    text = "input file, or run folder, whose config.toml is used"
    add("input", type=input_of, metavar="INPUT.toml|RUN_DIR", help=text)
    add("--out", type=Path, metavar="FILE.svg", help="write the picture as an SVG file")
    text = "draw the blocks of this parameter (default: the largest matrix of the first block)"
    add("--matrix", metavar="NAME", help=text)
    text = "number of ranks (default: product of the sizes in [mesh], if the input sets x, y or z)"
    add("--ranks", type=number_of_ranks, metavar="N", help=text)
    text = "draw the hosts of this machine: a name in inputs/machines, or a machine file"
    add("--machine", metavar="NAME|FILE", help=text)
    return parser


def _layout(options: Namespace, overrides: Sequence[str]) -> None:
    from hpc3d.analyze.picture import layout_svg
    from hpc3d.analyze.picture.layout_text import lines
    from hpc3d.analyze.picture.rank_blocks import RankBlocks
    from hpc3d.analyze.report.palette import LAYERS
    from hpc3d.console.small_files import replacing
    from hpc3d.predict.machine.machine_file import load
    from hpc3d.predict.simulation.simulator import load_resolved

    if options.out and options.out.suffix != ".svg":
        raise ValueError(f"--out {options.out}: the picture is an SVG file; use a name in .svg")
    config, machine = all_results(
        lambda: load_resolved(options.input, overrides, options.ranks),
        lambda: load(options.machine) if options.machine else None,
    )
    size, node = config.grid().size, machine.ranks_per_node if machine else 0
    blocks = RankBlocks(config, [rank // node for rank in range(size)] if node else ())
    for line in lines(blocks, options.matrix):
        print(line)
    if options.out:
        with replacing(options.out) as path:
            path.write_text(layout_svg.page(blocks, LAYERS, options.matrix), encoding="utf-8")
        print(sanitized(f"written to {options.out}"))


if __name__ == "__main__":
    sys.exit(main())
