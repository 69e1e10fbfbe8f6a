"""The page in a real browser: it draws, answers to the mouse, prints, and asks for nothing."""

import io

import numpy as np
import pytest

from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.step_timeline import KINDS
from hpc3d.analyze.report.write import write
from tests.analyze.naps import trained
from tests.analyze.report.browser import browser, chromium

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not chromium(), reason="no chromium here: apt-get install chromium"),
]
PIPELINE = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 4, "parallel__schedule": "1f1b"}
MODEL = "Bokeh.documents[0].get_model_by_name('timeline')"
EVENTS = f"{MODEL}.tags[1]"
DRAWN = "window.Bokeh && Bokeh.documents.length && Bokeh.documents.every(each => each.is_idle)"
DETAILS = "document.querySelector('.timeline .details').innerText"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """The page of a real pipeline of 2 stages on 4 ranks."""
    out = tmp_path_factory.mktemp("report")
    with trained(out / "run", 4, **PIPELINE) as trace:
        write(compare([trace], [analyze_run(trace)]), out)
    return out / "report.html"


@pytest.fixture
def page(address, tmp_path):
    with browser(tmp_path / "profile") as found:
        found.open(address)
        found.until(DRAWN)
        found.value("document.querySelector('.timeline').scrollIntoView()")
        yield found
        assert found.complaints() == []
        assert found.requests() == [address.as_uri()]


def place(page, what):
    """Left, top, width and height of an element in the window."""
    box = f"document.querySelector({what!r}).getBoundingClientRect()"
    return page.value(f"(b => [b.x, b.y, b.width, b.height])({box})")


def pixels(page, what):
    """The colours of an element as it is seen, [pixels, 3]."""
    from matplotlib.image import imread

    box = dict(zip(("x", "y", "width", "height"), place(page, what)))
    box["y"] += page.value("window.scrollY")
    found = imread(io.BytesIO(page.screenshot(clip={**box, "scale": 1})))
    return np.rint(found[..., :3].reshape(-1, 3) * 255).astype(int)


def share(found, colour):
    """Of the pixels, those of a colour written #RRGGBB."""
    wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return (found == wanted).all(1).mean()


def columns(page):
    """The columns of the boxes as the browser has them."""
    names = "rank", "start", "until", "end", "meeting", "kind", "row"
    return {
        name: np.array(page.value(f"Array.from({EVENTS}.data.{name})"), float) for name in names
    }


@pytest.mark.parametrize("width", [400, 1280])
def test_the_page_is_as_wide_as_its_window(page, width):
    page.call(
        "Emulation.setDeviceMetricsOverride",
        **{"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    page.until(f"innerWidth === {width} && {DRAWN}")
    assert page.value("document.documentElement.scrollWidth") <= width
    if width == 1280:
        hidden = "[...document.querySelectorAll('details[open] .scroll')].filter(each => "
        hidden += "each.scrollWidth > each.clientWidth + 1).length"
        assert page.value(hidden) == 0


def look_at(page, start, end):
    """Show the time from start to end."""
    page.value(f"{MODEL}.x_range.setv({{start: {start}, end: {end}}}); 0")
    page.until(DRAWN)
    page.value("new Promise(done => setTimeout(done, 300))")


@pytest.mark.parametrize("kind", ["forward", "backward", "wait"])
def test_boxes_are_drawn_in_their_colours(page, kind):
    """Of the longest box of a kind, which is 0.84 of one row of four, every second pixel."""
    events = columns(page)
    left, right = ("start", "until") if kind == "wait" else ("until", "end")
    these = events["until"] > events["start"]
    if kind != "wait":
        these = events["kind"] == [*KINDS].index(kind)
    widths = np.where(these, events[right] - events[left], 0)
    start, width = events[left][widths.argmax()], widths.max()
    look_at(page, start, start + 2 * width)
    assert share(pixels(page, ".timeline .screen"), KINDS[kind]) > 0.05
    look_at(page, start + 1e6, start + 2e6)
    assert share(pixels(page, ".timeline .screen"), KINDS[kind]) < 0.01, "in the legend only"


def click_on_a_box(page):
    """Click along the row of rank 2 until a box is hit."""
    left, top, width, height = place(page, ".timeline .screen")
    for at in np.linspace(0.15, 0.85, 29):
        page.click(left + at * width, top + 0.55 * height)
        page.value("new Promise(done => setTimeout(done, 100))")
        if "took" in page.value(DETAILS):
            return page.value(f"{EVENTS}.selected.indices[0]")
    raise AssertionError("no box was hit")


def test_a_click_shows_what_a_box_is(page):
    assert page.value(DETAILS) == "Click on a box."
    index, events = click_on_a_box(page), columns(page)
    words = page.value(DETAILS).split("\n")
    said = dict(zip(words[::2], words[1::2]))
    rank = int(events["rank"][index])
    assert said["rank"] == f"{rank} (p={rank // 2} x={rank % 2})"
    number, unit = said["took"].split()
    took = float(number) * {"us": 1e-3, "ms": 1}[unit]
    assert took == pytest.approx(events["end"][index] - events["start"][index], abs=2e-3)
    assert said["phase"] in ("forward", "backward", "optimizer", "other")
    assert {"name", "when", "stage", "operation"} <= said.keys()


def test_a_call_is_shown_with_those_that_belong_to_it(page):
    events = columns(page)
    waited = np.flatnonzero(events["until"] > events["start"])
    index = int(waited[np.argmax((events["until"] - events["start"])[waited])])
    page.value(f"{EVENTS}.selected.indices = [{index}]; 0")
    chosen = page.value(f"{EVENTS}.selected.indices")
    assert {*chosen} == {*np.flatnonzero(events["meeting"] == events["meeting"][index]).tolist()}
    text = page.value(DETAILS)
    for word in ("waited", "for rank", "arrivals", "bytes", "number"):
        assert word in text
    assert "along" in text or "over all ranks" in text  # as the group of the call is
    assert text.count("after") == len(chosen) > 1


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("1", [1]),
        ("0-1, 3", [0, 1, 3]),
        ("x=1", [1, 3]),
        ("p=1 x=0", [2]),
        ("0-2 x=0", [0, 2]),
        ("", [0, 1, 2, 3]),
        ("9", None),
        ("q=1", None),
    ],
)
def test_ranks_are_chosen(page, words, ranks):
    page.value("document.querySelector('.timeline input').focus()")
    page.call("Input.insertText", text="0 ")
    page.value("document.querySelector('.timeline input').value = ''")
    page.call("Input.insertText", text=words or " ")
    events = columns(page)
    wrong = page.value("document.querySelector('.timeline input').className == 'wrong'")
    assert wrong == (ranks is None)
    if ranks is None:
        assert {*events["rank"][np.isfinite(events["row"])]} == {0}, "as it was"
        return
    rows = {rank: place for place, rank in enumerate(ranks)}
    expected = [rows.get(rank, np.nan) for rank in events["rank"]]
    np.testing.assert_array_equal(events["row"], expected)
    assert page.value(f"[{MODEL}.y_range.start, {MODEL}.y_range.end]") == [len(ranks) - 0.5, -0.5]
    labels = page.value(f"[...{MODEL}.left.find(each => each.ticker).major_label_overrides]")
    assert labels == [[place, str(rank)] for place, rank in enumerate(ranks)]


def test_a_name_in_the_legend_hides_its_boxes(page):
    events = columns(page)
    these = events["kind"] == [*KINDS].index("forward")
    longest = np.where(these, events["end"] - events["until"], 0).argmax()
    look_at(page, events["until"][longest], events["end"][longest])
    before = share(pixels(page, ".timeline .screen"), KINDS["forward"])
    left, top, *_ = place(page, ".timeline .screen")
    page.click(left + 90, top + 10)
    page.until(f"{MODEL}.renderers.some(each => !each.visible && each.view)")
    page.value("new Promise(done => setTimeout(done, 300))")
    after = share(pixels(page, ".timeline .screen"), KINDS["forward"])
    assert after < 0.1 * before


SEEN = """
[...document.querySelectorAll({!r})].map(each => each.offsetWidth * each.offsetHeight > 0)
"""


def test_paper_gets_the_still_figures(page):
    assert all(page.value(SEEN.format(".screen"))) and not any(page.value(SEEN.format(".paper")))
    page.call("Emulation.setEmulatedMedia", media="print")
    assert not any(page.value(SEEN.format(".screen"))) and all(page.value(SEEN.format(".paper")))
    assert page.value(
        "[...document.images].every(each => each.complete && each.naturalWidth > 100)"
    )
    assert page.pdf().startswith(b"%PDF")


def test_without_scripts_the_still_figures_are_seen(address, tmp_path):
    with browser(tmp_path / "profile") as page:
        page.call("Emulation.setScriptExecutionDisabled", value=True)
        page.open(address)
        assert all(page.value(SEEN.format(".paper")))
        assert not any(page.value(SEEN.format("div.screen, .ranks-field")))
        assert page.requests() == [address.as_uri()]


def test_the_check_itself_finds_requests_and_errors(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>lost()</script>")
    with browser(tmp_path / "profile") as page:
        page.open(path)
        page.until("document.images[0].complete")
        assert page.requests() == [path.as_uri(), "http://127.0.0.1:9/x.png"]
        assert len(page.complaints()) >= 2
