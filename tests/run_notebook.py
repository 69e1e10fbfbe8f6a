"""Run a notebook without Jupyter: the cells in order, and what a notebook would show of each last
value.

    python -m tests.run_notebook notebooks/cube.ipynb
"""

import ast
import json
import sys
from pathlib import Path


def cells(path):
    """The sources of the cells of code."""
    notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(path):
    names = {"__name__": "__main__"}
    for number, source in enumerate(cells(path)):
        tree = ast.parse(source, f"{path}, cell {number}")
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{path}, cell {number}", "exec"), names)
        if last:
            show(
                eval(compile(ast.Expression(last.value), f"{path}, cell {number}", "eval"), names)
            )


def show(value):
    """Print what a notebook shows, of an image its size; nothing for None."""
    if hasattr(value, "_repr_png_"):
        image = value._repr_png_()
        assert image.startswith(b"\x89PNG")
        print(f"an image of {len(image)} bytes")
    elif hasattr(value, "_repr_html_"):
        print(value._repr_html_())
    elif value is not None:
        print(repr(value))


if __name__ == "__main__":
    run(sys.argv[1])
