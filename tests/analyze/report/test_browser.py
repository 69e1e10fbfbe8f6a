"""The report in a real browser: drawing, mouse, printing, and no network requests."""

import io
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from hpc3d.analyze.report.palette import PATH
from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.step_timeline import KINDS
from hpc3d.analyze.report.write import write
from tests.analyze.delayed_runs import trained
from tests.analyze.report.browser import missing, opened, started
from tests.analyze.small import small

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "")]
STATIC = ("png", "svg")  # formats of figure files, which the page contains for printing
PIPELINE = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 4, "parallel__schedule": "1f1b"}
MODEL = "Bokeh.documents[0].get_model_by_name('timeline')"
EVENTS = f"{MODEL}.tags[1]"
DRAWN = "window.Bokeh && Bokeh.documents.length && Bokeh.documents.every(each => each.is_idle)"
DRAWN += " && [...document.querySelectorAll('.timeline')].every(each => each.dataset.step)"
DETAILS = "document.querySelector('.timeline .details').innerText"
STEP = "document.querySelector('.timeline').dataset.step"
OTHER = "[...document.querySelectorAll('.timeline option')].map(e => e.value)"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Address of the report of a real pipeline with 2 stages on 4 ranks."""
    out = tmp_path_factory.mktemp("report")
    with trained(out / "run", 4, **PIPELINE) as trace:
        write(compare([trace], [analyze_run(trace, others=10_000)]), out, formats=STATIC)
    return out / "report.html"


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Address of the report of two runs with known values."""
    out = tmp_path_factory.mktemp("comparison")
    with small(out / "one.h5") as one, small(out / "two.h5", run_id="two") as two:
        write(compare([one, two], [analyze_run(each) for each in (one, two)]), out, formats=STATIC)
    return out / "report.html"


@pytest.fixture(scope="module")
def browser():
    with started() as found:
        yield found


@pytest.fixture
def page(browser, address):
    with opened(browser) as found:
        found.open(address)
        found.until(DRAWN)
        found.value("document.querySelector('.timeline').scrollIntoView()")
        yield found
        assert found.complaints == []
        assert {url.split("#")[0] for url in found.requests} == {address.as_uri()}


def place(page, what):
    """Return left, top, width and height of an element in the window."""
    box = f"document.querySelector({what!r}).getBoundingClientRect()"
    return page.value(f"(b => [b.x, b.y, b.width, b.height])({box})")


def pixels(page, what):
    """Return the displayed colors of an element, [pixels, 3]."""
    from matplotlib.image import imread

    found = imread(io.BytesIO(page.tab.locator(what).first.screenshot()))
    return np.rint(found[..., :3].reshape(-1, 3) * 255).astype(int)


def share(found, color):
    """Return the fraction of pixels that have the color #RRGGBB."""
    wanted = [int(color[at : at + 2], 16) for at in (1, 3, 5)]
    return (found == wanted).all(1).mean()


def columns(page):
    """Return the columns of the boxes, as stored in the browser."""
    names = "rank", "start", "until", "end", "meeting", "kind", "row"
    return {
        name: np.array(page.value(f"Array.from({EVENTS}.data.{name})"), float) for name in names
    }


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_page_fits_the_window_width(page, width):
    page.tab.set_viewport_size({"width": width, "height": 900})
    page.until(f"innerWidth === {width} && {DRAWN}")
    assert page.value("document.documentElement.scrollWidth") <= width
    if width == 1400:
        hidden = "[...document.querySelectorAll('details[open] .scroll')].filter(each => "
        hidden += "each.scrollWidth > each.clientWidth + 1).length"
        assert page.value(hidden) == 0


@pytest.mark.parametrize("width", [400, 1400])
def test_tiles_are_in_rows_of_nearly_equal_length(page, width):
    page.tab.set_viewport_size({"width": width, "height": 900})
    page.until(f"innerWidth === {width} && {DRAWN}")
    tops = "[...document.querySelectorAll('.cards > div')].map(each => each.offsetTop)"
    lengths = [*Counter(page.value(tops)).values()]
    assert len(lengths) > 1 and max(lengths) - min(lengths) <= 1


def test_legend_leaves_room_for_the_plot_in_narrow_windows(page):
    plots = "[...Bokeh.documents].flatMap(d => d.roots()).flatMap(root => [...root.references()])"
    plots += (
        ".filter(each => each.above?.some(part => part.type === 'Legend') && each.inner_width)"
    )
    page.tab.set_viewport_size({"width": 1400, "height": 900})
    page.until(f"innerWidth === 1400 && {DRAWN}")
    heights = np.array(page.value(f"{plots}.map(each => each.inner_height)"))
    page.tab.set_viewport_size({"width": 400, "height": 900})
    page.until(f"{plots}.every(each => each.inner_width < 400)")
    page.value("new Promise(done => setTimeout(done, 300))")
    assert len(heights) > 5
    narrow = np.array(page.value(f"{plots}.map(each => each.inner_height)"))
    assert (narrow > 0.8 * heights).all(), (narrow, heights)


def look_at(page, start, end):
    """Show the time from start to end."""
    page.value(f"void {MODEL}.x_range.setv({{start: {start}, end: {end}}})")
    page.until(DRAWN)
    page.value("new Promise(done => setTimeout(done, 300))")


@pytest.mark.parametrize("kind", ["forward", "backward", "wait"])
def test_timeline_boxes_have_the_colors_of_their_kind(page, kind):
    """Tests every second pixel of the longest box of a kind, which is 0.84 of one row of four."""
    events = columns(page)
    left, right = ("start", "until") if kind == "wait" else ("until", "end")
    these = events["until"] > events["start"]
    if kind != "wait":
        these = events["kind"] == [*KINDS].index(kind)
    widths = np.where(these, events[right] - events[left], 0)
    start, width = events[left][widths.argmax()], widths.max()
    look_at(page, start, start + 2 * width)
    assert share(pixels(page, ".timeline .plot"), KINDS[kind]) > 0.05
    look_at(page, start + 1e6, start + 2e6)
    assert share(pixels(page, ".timeline .plot"), KINDS[kind]) < 0.01, "in the legend only"


def click_on_a_box(page):
    """Click along the row of rank 2 until a box is hit."""
    left, top, width, height = place(page, ".timeline .plot")
    for at in np.linspace(0.15, 0.85, 29):
        page.click(left + at * width, top + 0.55 * height)
        page.value("new Promise(done => setTimeout(done, 100))")
        if "took" in page.value(DETAILS):
            return page.value(f"{EVENTS}.selected.indices")
    raise AssertionError("no box was hit")


def test_click_on_a_box_shows_its_details(page):
    assert page.value(DETAILS) == "Click on a box to see its details."
    chosen, events = click_on_a_box(page), columns(page)
    (index,) = (each for each in chosen if events["rank"][each] == 2)  # of a call, all ranks' are
    words = page.value(DETAILS).split("\n")
    said = dict(zip(words[::2], words[1::2]))
    assert said["rank"] == "2 (p=1 x=0)"
    number, unit = said["took"].split()
    took = float(number.replace(",", "")) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit]
    assert took == pytest.approx(events["end"][index] - events["start"][index], rel=6e-3)
    assert said["phase"] in ("forward", "backward", "optimizer", "other")
    assert {"name", "when", "stage", "operation"} <= said.keys()


def test_selecting_a_call_highlights_it_on_all_members(page):
    events = columns(page)
    waited = np.flatnonzero(events["until"] > events["start"])
    index = int(waited[np.argmax((events["until"] - events["start"])[waited])])
    page.value(f"void ({EVENTS}.selected.indices = [{index}])")
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
def test_timeline_ranks_can_be_filtered(page, words, ranks):
    page.tab.locator(".timeline input").fill("0")
    page.tab.locator(".timeline input").fill(words)
    events = columns(page)
    wrong = page.value("document.querySelector('.timeline input').classList.contains('wrong')")
    assert wrong == (ranks is None)
    if ranks is None:
        assert {*events["rank"][np.isfinite(events["row"])]} == {0, 1, 2, 3}
        return
    rows = {rank: place for place, rank in enumerate(ranks)}
    expected = [rows.get(rank, np.nan) for rank in events["rank"]]
    np.testing.assert_array_equal(events["row"], expected)
    assert page.value(f"[{MODEL}.y_range.start, {MODEL}.y_range.end]") == [len(ranks) - 0.5, -0.5]
    labels = page.value(f"[...{MODEL}.left.find(each => each.ticker).major_label_overrides]")
    assert labels == [[place, str(rank)] for place, rank in enumerate(ranks)]


def test_click_on_a_legend_entry_hides_its_boxes(page):
    events = columns(page)
    these = events["kind"] == [*KINDS].index("forward")
    longest = np.where(these, events["end"] - events["until"], 0).argmax()
    look_at(page, events["until"][longest], events["end"][longest])
    before = share(pixels(page, ".timeline .plot"), KINDS["forward"])
    left, top, *_ = place(page, ".timeline .plot")
    page.click(left + 190, top + 10)
    page.until(f"{MODEL}.renderers.some(each => !each.visible && each.view)")
    page.value("new Promise(done => setTimeout(done, 300))")
    after = share(pixels(page, ".timeline .plot"), KINDS["forward"])
    assert after < 0.1 * before


SEEN = """
[...document.querySelectorAll({!r})].map(each => each.offsetWidth * each.offsetHeight > 0)
"""


def test_print_view_shows_the_static_figures(page):
    assert all(page.value(SEEN.format(".screen"))) and not any(page.value(SEEN.format(".paper")))
    page.tab.emulate_media(media="print")
    assert not any(page.value(SEEN.format(".screen"))) and all(page.value(SEEN.format(".paper")))
    assert page.value(
        "[...document.images].every(each => each.complete && each.naturalWidth > 100)"
    )
    assert page.tab.pdf().startswith(b"%PDF")


def test_plots_are_printed_if_there_are_no_static_figures(browser, tmp_path):
    with small(tmp_path / "trace.h5") as trace:
        write(compare([trace], [analyze_run(trace)]), tmp_path)
    with opened(browser, color_scheme="dark") as page:
        page.open(tmp_path / "report.html")
        page.until(DRAWN)
        page.tab.emulate_media(media="print")
        assert all(page.value(SEEN.format(".screen")))
        page.value("dispatchEvent(new Event('beforeprint'))")
        assert page.value("document.documentElement.dataset.theme") == "light"
        page.value("dispatchEvent(new Event('afterprint'))")
        assert page.value("document.documentElement.dataset.theme") == "dark"


def test_static_figures_are_shown_without_javascript(browser, address):
    with opened(browser, java_script_enabled=False) as page:
        page.open(address)
        pictures = page.tab.locator(".paper")
        assert all(each.is_visible() for each in pictures.all()) and pictures.count() > 5
        active = page.tab.locator("div.screen, .controls").all()
        assert not any(each.is_visible() for each in active)


def test_browser_fixture_detects_requests_and_errors(browser, tmp_path):
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>lost()</script>")
    with opened(browser) as page:
        page.open(path)
        page.until("document.images[0].complete")
        assert page.requests == [path.as_uri(), "http://127.0.0.1:9/x.png"]
        assert len(page.complaints) >= 2


def test_button_toggles_the_critical_path(page):
    line = f"{MODEL}.renderers.find(each => each.name === 'path').visible"
    button = page.tab.get_by_role("button", name="critical path")
    assert page.value(line) and button.get_attribute("aria-pressed") == "true"
    assert share(pixels(page, ".timeline .plot"), PATH) > 1e-3
    button.click()
    assert not page.value(line) and button.get_attribute("aria-pressed") == "false"
    assert "path=off" in page.tab.url


def test_every_step_can_be_selected(page):
    steps, shown = page.value(OTHER), page.value(STEP)
    assert len(steps) > 1 and shown in steps
    before = columns(page)["start"]
    other = next(step for step in steps if step != shown)
    page.tab.get_by_label("step of the timeline").select_option(other)
    page.until(f"{STEP} === '{other}'")
    assert not np.array_equal(columns(page)["start"], before)


def test_page_state_is_restored_from_the_url(browser, address):
    with opened(browser, color_scheme="light") as page:
        page.open(address)
        page.until(DRAWN)
        other = next(step for step in page.value(OTHER) if step != page.value(STEP))
        page.tab.get_by_label("step of the timeline").select_option(other)
        page.tab.get_by_role("textbox", name="Ranks").fill("p=1 x=0")
        page.tab.get_by_role("button", name="critical path").click()
        page.tab.get_by_role("button", name="dark").click()
        page.tab.get_by_role("link", name="Memory", exact=True).click()
        page.until("location.hash.startsWith('#memory-1&')")
        url = page.tab.url
    with opened(browser, color_scheme="light") as page:
        page.tab.goto(url)
        page.until(f"{STEP} === '{other}'")
        page.until("scrollY > 500")
        assert page.tab.get_by_role("textbox", name="Ranks").input_value() == "p=1 x=0"
        assert {*columns(page)["rank"][np.isfinite(columns(page)["row"])]} == {2}
        assert not page.value(f"{MODEL}.renderers.find(each => each.name === 'path').visible")
        assert page.value("document.documentElement.dataset.theme") == "dark"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_color_scheme_of_the_system(browser, address, scheme):
    with opened(browser, color_scheme=scheme) as page:
        page.open(address)
        page.until(DRAWN)
        ground = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 31)"}
        assert (
            page.value("getComputedStyle(document.documentElement).backgroundColor")
            == (ground[scheme])
        )
        color = page.value(f"{MODEL}.below[0].major_label_text_color")
        assert color == page.value("getComputedStyle(document.body).color")
        page.tab.get_by_role("button", name="dark").click()
        turned = {"light": "dark", "dark": "light"}[scheme]
        assert page.value("document.documentElement.dataset.theme") == turned
        assert f"theme={turned}" in page.tab.url


def test_matrix_product_details_show_size_and_rate(page):
    names = page.value(f"{MODEL}.tags[0].names.name")
    index = page.value(
        f"(() => {{ const e = {EVENTS}.data; return e.name.findIndex("
        f"(code) => {MODEL}.tags[0].names.name[code].startsWith('gemm m=')) }})()"
    )
    assert any(name.startswith("gemm m=") for name in names) and index >= 0
    said = page.value(f"hpc3d.lines({EVENTS}.data, {MODEL}.tags[0], {index})")
    assert (
        "name: gemm\n" in said and "FLOP/s" in said and "% of the highest rate in the step" in said
    )
    m, n, k = (int(word.split()[1]) for word in said.split("size: ")[1].split("\n")[0].split(", "))
    assert 2 * m * n * k == page.value(f"{EVENTS}.data.flops[{index}]")


def test_arrow_keys_move_between_boxes(page):
    page.tab.locator(".timeline .plot").focus()
    for key, rank in (("ArrowRight", 0), ("ArrowRight", 0), ("ArrowDown", 1), ("ArrowLeft", 1)):
        page.tab.keyboard.press(key)
        page.until(f"{DETAILS}.startsWith('rank\\n{rank} ')")
    width = f"{MODEL}.x_range.end - {MODEL}.x_range.start"
    before = page.value(width)
    page.tab.keyboard.press("+")
    assert page.value(width) == pytest.approx(before / 2)


def test_table_can_be_sorted_searched_and_copied(page):
    page.tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    box = page.tab.locator("details.table[data-title='Time by rank']")
    head = box.get_by_role("button", name="rank", exact=True)
    for order, ranks in (("ascending", "0123"), ("descending", "3210")):
        head.focus()
        page.tab.keyboard.press("Enter")
        assert box.locator(f"th[aria-sort={order}]").count() == 1
        found = box.locator("tbody tr td:first-child").all_inner_texts()
        assert "".join(found) == ranks
    times = box.get_by_role("button", name="compute [ms]")
    times.click()
    found = box.locator("tbody tr td:nth-child(5)").all_inner_texts()
    assert sorted(found, key=lambda text: float(text.replace(",", ""))) == found
    box.get_by_role("searchbox").fill("no such rank")
    assert box.get_by_role("status").inner_text() == "0 of 4 rows"
    box.get_by_role("searchbox").fill("")
    box.get_by_role("button", name="copy Time by rank").click()
    box.get_by_text("4 rows copied").wait_for()
    lines = page.value("navigator.clipboard.readText()").split("\n")
    assert len(lines) == 5 and lines[0].startswith("rank\thost")


LEVELS = "[...document.querySelectorAll('h1, h2, h3, h4')].map(e => +e.tagName[1])"
NAMELESS = """
[...document.querySelectorAll('button, input, select, [tabindex]')].filter(each =>
  !(each.getAttribute('aria-label') || each.textContent.trim() || each.labels?.length)).length
"""


def test_headings_are_nested_and_controls_have_labels(page):
    levels = page.value(LEVELS)
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert page.value(NAMELESS) == 0
    assert page.value("[...document.images].every(each => each.alt.length > 5)")
    page.value("scrollTo(0, 0)")
    page.tab.keyboard.press("Tab")
    assert page.value("document.activeElement.className") == "skip"


def test_pipeline_chart_shows_details_under_the_mouse(page):
    page.tab.locator(".pipeline .screen").scroll_into_view_if_needed()
    page.until(DRAWN)
    left, top, width, height = place(page, ".pipeline .screen")
    for at in np.linspace(0.1, 0.9, 17):
        page.tab.mouse.move(left + at * width, top + 0.22 * height)
        page.value("new Promise(done => setTimeout(done, 150))")
        if page.tab.get_by_text("microbatch").count():
            return
    raise AssertionError("no pass was hit")


def test_runs_of_a_comparison_are_collapsed(browser, comparison):
    with opened(browser) as page:
        page.open(comparison)
        page.until(DRAWN)
        runs = page.tab.locator("details.run")
        assert runs.count() == 2 and not any(
            page.value("[...document.querySelectorAll('details.run')].map(each => each.open)")
        )
        page.tab.get_by_role("navigation").get_by_role("link", name="two").first.click()
        page.until("document.querySelectorAll('details.run')[1].open")
        levels = page.value(LEVELS)
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        assert page.complaints == []
