"""Make python.txt, the text that hpc3d trains on by default, from an installed Python.

    python inputs/corpus/make.py

It writes beside itself the reference topics of Python's documentation (`pydoc_data.topics`) and
the longer docstrings of the standard library, and copies the licence of both.  The same release
of Python always gives the same bytes; README.md names the release and the digest.
"""

import ast
import hashlib
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

HERE = Path(__file__).parent
LIBRARY = Path(sysconfig.get_path("stdlib"))
SIZE = 1_000_000  # bytes, about
PROSE = 240  # characters; a shorter docstring is a signature rather than a text
NOT_LIBRARY = {"test", "tests", "idlelib", "lib2to3", "site-packages", "pydoc_data", "turtledemo"}


def main() -> None:
    """Write python.txt and LICENSE, and print what README.md says about them."""
    text = corpus().encode()
    (HERE / "python.txt").write_bytes(text)
    shutil.copyfile(LIBRARY / "LICENSE.txt", HERE / "LICENSE")
    print(f"Python {platform.python_version()}, {len(text):,} bytes")
    print(f"SHA-256 {hashlib.sha256(text).hexdigest()}")


def corpus() -> str:
    """All topics, then docstrings until the text has SIZE bytes."""
    texts, size = [], 0
    for text in passages():
        if size >= SIZE:
            break
        texts.append(text.strip())
        size += len(text.strip().encode()) + 2
    return "\n\n".join(texts) + "\n"


def passages() -> Iterator[str]:
    """Yield the topics by name, then the docstrings by module."""
    yield from (text for _, text in sorted(topics.items()))
    for path in sorted(LIBRARY.rglob("*.py")):
        if not NOT_LIBRARY & set(path.relative_to(LIBRARY).parts):
            yield from docstrings(path.read_text("utf-8"))


def docstrings(source: str) -> Iterator[str]:
    """Yield the prose of one module, in source order.

    A module with a copyright notice of its own may have a licence of its own: it is left out.
    """
    if "copyright" in source.lower():
        return
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node) or ""
        if len(text) >= PROSE and ">>>" not in text and "@" not in text:
            yield text


if __name__ == "__main__":
    main()
