"""The golden file of messages: every text that a user of hpc3d can see, to be reviewed as English.

    python -m tests.messages > tests/messages.txt

A text is a string in the source of hpc3d that has a word and a space and is not a docstring. An
f-string is its template, with the {expressions}.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hpc3d"
GOLDEN = Path(__file__).with_name("messages.txt")
COMMAND = "python -m tests.messages > tests/messages.txt"


def page():
    """Every line of every text, after its module; sorted, so that code may move in a module."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return "".join(
        f"{path.relative_to(PACKAGE).as_posix()}: {line}\n"
        for path in paths
        for line in sorted({*lines(path.read_text(encoding="utf-8"))})
    )


def lines(source):
    tree = ast.parse(source)
    skip = {id(part) for node in ast.walk(tree) for part in not_texts(node)}
    for node in ast.walk(tree):
        if id(node) not in skip:
            yield from (line.strip() for line in template(node).split("\n") if is_text(line))


def not_texts(node):
    """Docstrings, and the parts of an f-string, which is a text as a whole."""
    if isinstance(node, ast.Expr):
        yield node.value
    elif isinstance(node, ast.JoinedStr):
        yield from node.values


def template(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.FormattedValue):
        return f"{{{ast.unparse(node.value)}}}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def is_text(line):
    return " " in line.strip() and re.search("[a-z]{2}", re.sub(r"\{.*?\}", "", line)) is not None


if __name__ == "__main__":
    print(page(), end="")
