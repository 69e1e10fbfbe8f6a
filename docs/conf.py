"""The pages as HTML: make docs."""

import re
from pathlib import Path

HERE = Path(__file__).parent
project, author, copyright = "hpc3d", "hpc3d contributors", "hpc3d contributors, MIT license"
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc"]
autodoc_typehints = "none"  # the signature of a result would be longer than its text
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_validation_checks = {"GL08", "PR01", "PR02", "PR07", "RT03", "SS03", "SS06"}
# Results, which users do not construct.
numpydoc_validation_exclude = {
    r"(Drawing|FoundLayouts|Received|StageTimeline|StepPrediction|Table|matmul\.Matmul)$"
}
myst_heading_anchors = 3
smartquotes = False  # `--` would become a dash
html_theme = "pydata_sphinx_theme"
html_theme_options = {"navigation_with_keys": False, "navbar_center": []}
html_sidebars = {"**": ["globaltoc.html"]}
root_doc = "index"
# Pages whose files are outside of docs/. For each, setup() creates an empty file in docs/.
BESIDE = {
    "../README.md": "readme",
    "../CONTRIBUTING.md": "contributing",
    "../jobs/README.md": "jobs",
}
PAGES = {name: (HERE / path).resolve() for path, name in BESIDE.items()}
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def with_links(text, folder):
    """Return Markdown text with links to pages; links to other files become their names."""

    def link(found):
        image, words, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        target, sign, heading = target.partition("#")
        path = (folder / target).resolve()
        named = {page: name for name, page in PAGES.items()}
        if path in named:
            return f"[{words}]({named[path]}.md{sign}{heading})"
        if HERE in path.parents and path.exists():
            return f"{image}[{words}]({path.relative_to(HERE).as_posix()}{sign}{heading})"
        return words if words.startswith("`") else f"{words} (`{path.relative_to(HERE.parent)}`)"

    return LINK.sub(link, text)


def read(app, name, source):
    page = PAGES.get(name)
    text = page.read_text(encoding="utf-8") if page else source[0]
    source[0] = with_links(text, page.parent if page else HERE)


def contents(app, name, source):
    """Make a hidden toctree of the links below each heading of the index: the navigation."""
    if name != root_doc:
        return
    _, *sections = re.split(r"^## (.+)\n", source[0], flags=re.MULTILINE)
    for caption, text in zip(sections[::2], sections[1::2]):
        pages = dict.fromkeys(target for _, _, target in LINK.findall(text))
        lines = [f":caption: {caption}", ":hidden:", "", *pages]
        source[0] += "\n```{toctree}\n" + "\n".join(lines) + "\n```\n"


def setup(app):
    for name in PAGES:
        (HERE / f"{name}.md").touch()
    app.connect("source-read", read)
    app.connect("source-read", contents)
