"""Style violations of the code are counted and stay within limits."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.strided import daily

ROOT = Path(__file__).parents[1] / "hpc3d"
SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in sorted(ROOT.rglob("*.py"))
    if path.name not in ("__init__.py", "__main__.py")
}

USERS = {
    path.relative_to(ROOT.parent).as_posix(): path.read_text(encoding="utf-8")
    for folder in (ROOT, ROOT.parent / "tests")
    for path in sorted(folder.rglob("*.py"))
}

parsed = cache(ast.parse)


def several(found):
    """Return the names that occur more than once, with their places."""
    return [f"{name}: {', '.join(places)}" for name, places in found.items() if len(places) > 1]


def nodes(sources, *kinds):
    for path, source in sources.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, kinds):
                yield path, node


def doubled_classes(sources):
    found = defaultdict(list)
    for path, node in nodes(sources, ast.ClassDef):
        found[node.name].append(f"{path}:{node.lineno}")
    return several(found)


def doubled_files(sources):
    found = defaultdict(list)
    for path in sources:
        found[Path(path).stem].append(path)
    return several(found)


def full_folders(sources):
    found = defaultdict(list)
    for path in sources:
        found[Path(path).parent].append(path)
    return [folder for folder, paths in found.items() if len(paths) > 20]


def long_functions(sources):
    functions = nodes(sources, ast.FunctionDef)
    return [node.name for _, node in functions if node.end_lineno - node.lineno >= 41]


def many_parameters(sources):
    """Return functions with more than seven parameters."""
    found = []
    for path, node in nodes(sources, ast.FunctionDef):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        if len([each for each in given if each.arg not in ("self", "cls")]) > 7:
            found.append(f"{path}:{node.lineno} {node.name}")
    return found


def public_functions(sources):
    """Return public functions and methods, each with its path and its parameters."""
    for path, source in sources.items():
        tree = parsed(source)
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for home in [tree, *(each for each in classes if not each.name.startswith("_"))]:
            for node in home.body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield path, node, parameters(node, of_class=home is not tree)


def parameters(function, of_class):
    """Return the parameters of a function except `self`, `cls`, `*args` and `**named`."""
    given = function.args
    static = "staticmethod" in map(ast.unparse, function.decorator_list)
    return [*given.posonlyargs, *given.args][of_class and not static :] + given.kwonlyargs


def untyped(sources):
    """Return public functions without type annotations of parameters or results."""
    return [
        f"{path}:{node.lineno} {node.name}"
        for path, node, given in public_functions(sources)
        if node.returns is None or any(each.annotation is None for each in given)
    ]


def foreign_underscores(sources):
    """Return imported names that are private to another module."""
    return [
        f"{path}: {node.module}.{each.name}"
        for path, node in nodes(sources, ast.ImportFrom)
        for each in node.names
        if re.match("_[^_]", each.name)
    ]


def lonely_names(sources):
    """Return public functions and constants that only their own module uses."""
    return [
        f"{path}: {name}"
        for path, source in sources.items()
        for name in sorted(own_names(parsed(source)))
        if name not in FOUND_BY_NAME and not users()[name] - {f"hpc3d/{path}"}
    ]


@cache
def users():
    """Return the files that mention each name."""
    found = defaultdict(set)
    for path, source in USERS.items():
        for name in mentions(parsed(source)):
            found[name].add(path)
    return found


def mentions(tree):
    """Yield the names that a source uses from others: imports, attributes, and names in strings,
    which a test replaces or a command looks up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.split("[.:]", node.value)[-1]


def own_names(tree):
    """Return the public functions and constants of a module, except decorated functions, those in
    a public table, and constants named in its docstrings."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and not target.id.startswith("_")
    }
    held = {each.id for value in constants.values() for each in ast.walk(value) if is_name(each)}
    held |= {name for name, node in functions.items() if node.decorator_list}
    docs = [
        ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, DOCUMENTED)
    ]
    free = {name for name in functions if not name.startswith("_")} - held
    return free | {*constants} - {*re.findall(r"\w+", " ".join(docs))}


FOUND_BY_NAME = ("main", "log", "SHAPES", "row_of")  # commands, logging, launches of .cu files
DOCUMENTED = ast.Module | ast.FunctionDef | ast.ClassDef


def is_name(node):
    return isinstance(node, ast.Name)


LIMITS = [
    (doubled_classes, 0, {"a.py": "class A: pass", "b.py": "class A: pass"}),
    (doubled_files, 0, {"one/a.py": "", "two/a.py": ""}),
    (full_folders, 0, {f"one/{number}.py": "" for number in range(21)}),
    (long_functions, 0, {"a.py": "def f():\n" + 41 * "    0\n"}),
    (untyped, 0, {"a.py": "def f(a, /, b: int, *, c: str, d=0) -> None: pass"}),
    (foreign_underscores, 0, {"a.py": "from hpc3d.b import _c, d, __version__"}),
    (lonely_names, 0, {"a.py": "def nobody_takes_it():\n    pass\n\n\ndef _own():\n    pass\n"}),
    (many_parameters, 10, {"a.py": "def f(a, b, c, d, e, f, g, h): pass"}),
]


@pytest.mark.slow
@daily
@pytest.mark.parametrize(
    ("count", "limit", "planted"), LIMITS, ids=[count.__name__ for count, *_ in LIMITS]
)
def test_style_violations_are_within_their_limits(count, limit, planted):
    found = count(SOURCES)
    assert len(found) <= limit, found
    assert len(count(planted)) == 1
