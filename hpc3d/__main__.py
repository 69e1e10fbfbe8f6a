"""Lists the commands of hpc3d with one line each."""

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

import hpc3d


def verbs() -> Iterator[tuple[str, str]]:
    """Each top-level module with a `main`, and the first line of its docstring.

    The modules are parsed, not imported: the list costs no NumPy and starts no MPI.
    """
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in module.body):
            yield path.stem, (ast.get_docstring(module) or "").partition("\n")[0]


def listing() -> str:
    """The version and one line a command."""
    lines = [f"  python -m hpc3d.{verb:<10} {line}" for verb, line in verbs()]
    return "\n".join([f"hpc3d {hpc3d.__version__}: {hpc3d.__doc__}", "", *lines])


def main() -> None:
    """Prints the listing; refuses a command, which is spelled with a dot."""
    parser = argparse.ArgumentParser(
        prog="python -m hpc3d",
        usage="python -m hpc3d.<command> --help",
        description=listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    parser.print_help()


if __name__ == "__main__":
    main()
