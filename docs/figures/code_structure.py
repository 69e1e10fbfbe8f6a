"""Draw the figures of docs/architecture.md: python docs/figures/code_structure.py

The layers are read from setup.cfg, which also configures import-linter.
"""

from configparser import ConfigParser
from pathlib import Path

from parallel_training import INK, SHADES, arrow, box, canvas, write


def floors():
    """The folders of hpc3d by layer; a module imports from its own folder or a lower layer."""
    setup = ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    layers = setup["importlinter:contract:layers"]["layers"].split("\n")[3:]
    figure, axes = canvas(7.5, 5.6, 100, 98)
    names = [["commands: hpc3d/*.py"], *(sorted(layer.split(" | ")) for layer in layers)]
    for number, folders in enumerate(names):
        y, width = 6 * number, 84 / len(folders)
        for column, name in enumerate(folders):
            box(axes, 14 + width * column, y, width, 4.8, SHADES[0 if number == 0 else 1], name)
    arrow(axes, (7, 2), (7, 93), color=INK)
    axes.text(4, 48, "imports", rotation=90, ha="center", va="center")
    return figure


def microbatch():
    """The modules that a microbatch passes, and the instructions that run them."""
    figure, axes = canvas(7.5, 4.6, 106, 62)
    steps = [
        ("data/batches.py", "windows of a step, read by rank 0"),
        ("training/microbatch_loader.py", "broadcast, split into microbatches"),
        ("pipeline/engine.py", "instructions of the stage: F, B, W, messages"),
        ("model/stage.py, model/block.py", "embedding, blocks, head and loss"),
        ("tensor/matmul.py", "gather, multiply, reduce"),
        ("pipeline/gradient_buckets.py", "Reduce: gradient reduction over d"),
        ("training/optimizers/optimizer.py", "Step: update of the parameters"),
    ]
    for number, (module, text) in enumerate(steps):
        y = 9 * number
        box(axes, 2, y, 46, 6, SHADES[1 if number < 5 else 0], module)
        axes.text(70, y + 3, text, va="center")
        if number not in (0, 5):
            arrow(axes, (20, y - 3), (20, y), color=INK)
    for number in (3, 4):
        y = 9 * number
        arrow(axes, (30, y), (30, y - 3), color=INK)
    arrow(axes, (48, 21), (48, 48), color=INK, connectionstyle="arc3,rad=-0.55")
    axes.text(57.5, 34.5, "after\nlast B, W", ha="left", va="center", size=8)
    return figure


if __name__ == "__main__":
    write({"floors": floors, "microbatch": microbatch})
