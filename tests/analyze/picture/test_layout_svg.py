"""The SVG picture is well-formed, fits its frame, and has the text form as its description."""

from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import pytest

from hpc3d.analyze.picture.layout_svg import page
from hpc3d.analyze.picture.layout_text import lines
from hpc3d.analyze.picture.rank_blocks import RankBlocks
from hpc3d.analyze.report.palette import LAYERS
from tests.analyze.picture.layouts import SHIPPED, blocks_of
from tests.analyze.report.browser import missing, opened, started
from tests.pipeline.mixes import LARGE, MIXES, config_of

SVG = "{http://www.w3.org/2000/svg}"
BOXES = """[...document.querySelectorAll('text')].map(each => {
  const box = each.getBBox(); return [each.textContent, box.x, box.y, box.width, box.height]})"""

DENSE = "gpt-3d-64", "gpt-1d-64", "gpt-3d-12", "moe-gshard-64", "gshard-600b", "llama-3-405b"


@pytest.mark.parametrize("name", SHIPPED)
def test_description_is_the_text_form_and_every_drawn_rank_has_a_box(name):
    blocks = blocks_of(*SHIPPED[name])
    tree = ElementTree.fromstring(page(blocks, LAYERS))
    described = tree.find(f"{SVG}desc").text.split("\n")
    assert described == [" ".join(each.split()) for each in lines(blocks)]
    bold = [each.text for each in tree.iter(f"{SVG}text") if each.get("class") == "bold"]
    ranks = [int(each) for each in bold if each.isdigit()]
    assert ranks == [rank for row in blocks.rows for rank in row.ranks]


@pytest.mark.parametrize("name", [*SHIPPED, *MIXES, *LARGE])
def test_rectangles_are_inside_the_picture(name):
    known = name in SHIPPED
    blocks = blocks_of(*SHIPPED[name]) if known else RankBlocks(config_of(name))
    tree = ElementTree.fromstring(page(blocks, LAYERS))
    width, height = (float(tree.get(key)) for key in ("width", "height"))
    for each in tree.iter(f"{SVG}rect"):
        x, y, w, h = (float(each.get(key)) for key in ("x", "y", "width", "height"))
        assert x >= 0 and y >= 0 and x + w <= width + 0.01 and y + h <= height + 0.01


def test_names_are_escaped():
    blocks = RankBlocks(replace(blocks_of("gpt-serial").config, name="a<b>&c\0"))
    tree = ElementTree.fromstring(page(blocks, LAYERS))
    assert tree.find(f"{SVG}title").text.startswith("a<b>&c")


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
def test_no_text_overlaps_another_or_leaves_the_picture(tmp_path):
    with started() as browser, opened(browser) as page_of:
        for name in DENSE:
            text = page(blocks_of(*SHIPPED[name]), LAYERS)
            (tmp_path / "layout.svg").write_text(text, encoding="utf-8")
            page_of.open(tmp_path / "layout.svg")
            boxes = page_of.value(BOXES)
            height = float(ElementTree.fromstring(text).get("height"))
            for words, x, y, width, tall in boxes:
                inside = x >= 0 and y >= 0 and x + width <= 520 and y + tall <= height
                assert inside, f"{name}: {words}"
            hits = [(a[0], b[0]) for a, b in combinations(boxes, 2) if overlap(a, b)]
            assert not hits, f"{name}: {hits[:5]}"


def overlap(one, other, slack=2.5):
    """Return True if two boxes of texts overlap by more than the space around letters."""
    _, x, y, width, height = one
    _, left, top, wide, tall = other
    across = min(x + width, left + wide) - max(x, left)
    return across > 0.5 and min(y + height, top + tall) - max(y, top) > slack


@pytest.mark.skipif(bool(missing()), reason=missing() or "")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_picture_follows_the_color_scheme_of_its_page(scheme, tmp_path):
    """The picture is inside a page with a fixed scheme, and alone with the reader's scheme."""
    grounds = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 31)"}
    other = {"light": "dark", "dark": "light"}[scheme]
    text = page(blocks_of("gpt-serial"), LAYERS)
    (tmp_path / "alone.svg").write_text(text, encoding="utf-8")
    style = f"<style>:root {{ color-scheme: {scheme} }}</style>"
    (tmp_path / "page.html").write_text(f"<!doctype html>{style}{text}", encoding="utf-8")
    ground = "getComputedStyle(document.querySelector('.ground')).fill"
    with started() as browser:
        for name, preferred in (("page.html", other), ("alone.svg", scheme)):
            with opened(browser, color_scheme=preferred) as tab:
                tab.open(tmp_path / name)
                assert tab.value(ground) == grounds[scheme]
