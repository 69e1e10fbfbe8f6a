"""Contents of timeline figures."""

from itertools import pairwise

import numpy as np
import pytest

from hpc3d.analyze.metrics.pass_spans import spans
from hpc3d.analyze.report import plot_bokeh
from hpc3d.analyze.report.gantt import Panels, draw_gantt, gantt
from hpc3d.analyze.report.palette import WORK
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, timeline

MEASURED = [
    [(0.0, 1.0, "F", "0"), (1.0, 1.4, "message", ""), (3.0, 5.0, "BW", "0")],
    [(1.4, 2.4, "F", "0"), (2.4, 2.402, "BW", "17"), (4.5, 6.0, "reduce", ""), (6, 7, "step", "")],
]


def bars(panel):
    """Return (color, left, right, height) of every bar."""
    for collection in panel.collections:
        color = tuple(collection.get_facecolor()[0][:3])
        for path in collection.get_paths():
            left, low, right, high = path.get_extents().extents
            yield color, left, right, high - low


def rgb(text):
    return pytest.approx([int(text[place : place + 2], 16) / 255 for place in (1, 3, 5)])


def test_gantt_bars_match_the_spans():
    (panel,) = gantt([("measured", MEASURED)]).axes
    found = sorted((round(left, 6), round(right, 6)) for _, left, right, _ in bars(panel))
    assert found == sorted((start, end) for row in MEASURED for start, end, *_ in row)
    assert panel.get_title(loc="left") == "measured"
    low, high = panel.get_ylim()
    assert low > high, "stage 0 is on top"


def test_gantt_color_depends_on_kind_and_chunk():
    rows = [[(0, 1, "F", "0"), (1, 2, "1F", "0"), (2, 3, "2F", "0"), (3, 4, "B", "0")]]
    (panel,) = gantt([("", rows)]).axes
    colors = [color for color, *_ in sorted(bars(panel), key=lambda bar: bar[1])]
    assert list(colors[0]) == rgb(WORK["forward"])
    assert list(colors[3]) == rgb(WORK["backward_input"])
    assert sum(colors[0]) < sum(colors[1]) < sum(colors[2]) < 3
    assert len(set(colors)) == 4


def test_gantt_labels_appear_only_where_they_fit():
    (panel,) = gantt([("", MEASURED)]).axes
    assert sorted(text.get_text() for text in panel.texts) == ["0", "0", "0"]


def test_gantt_labels_and_titles_fit_in_a_narrow_figure():
    rows = [[(0.05 * pos, 0.05 * (pos + 1), "F", str(pos % 10)) for pos in range(100)]]
    title = (
        "simulated: mean pass times, instantaneous messages, idle 27.3%, one panel per schedule"
    )
    for width in (10.0, 3.3):
        figure = gantt([(title, rows)], width)
        figure.draw_without_rendering()
        (panel,) = figure.axes
        boxes = [text.get_window_extent() for text in panel.texts]
        assert len(boxes) == (100 if width == 10.0 else 0)
        assert all(left.x1 <= right.x0 for left, right in pairwise(boxes))
        (shown,) = [text for text in panel.get_children() if title[:9] in str(text)]
        assert shown.get_window_extent().x1 <= figure.bbox.width


def test_gantt_messages_and_reductions_are_thin():
    (panel,) = gantt([("", MEASURED)]).axes
    heights = {round(left, 6): round(height, 6) for _, left, _, height in bars(panel)}
    assert heights[1.0] == heights[4.5] < heights[0.0] / 2


def test_gantt_panels_share_the_time_axis_and_a_legend():
    figure = gantt([("measured", MEASURED), ("simulated", spans(small()))])
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0.0, 9.0)
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["forward", "backward", "message", "reduction", "optimizer"]


def small():
    return timeline(*instruction_streams("pipedream", 2, 2), Cost(1, 1, 1))


def test_gantt_file_is_an_image_with_the_pass_colors(tmp_path):
    from matplotlib import rc_context
    from matplotlib.image import imread

    with rc_context({"text.usetex": True}):  # as a user's matplotlibrc may ask for
        draw_gantt([("measured", MEASURED)], tmp_path / "gantt.png")
    picture = imread(tmp_path / "gantt.png")[..., :3]
    assert picture.shape[1] == 2000
    for color in (WORK["forward"], WORK["backward"]):
        wanted = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        assert (np.abs(picture - wanted).max(axis=-1) < 0.01).sum() > 1000


@pytest.mark.slow
def test_bokeh_panels_share_the_time_axis_and_label_passes():
    above, below = plot_bokeh.draw(Panels([("measured", MEASURED), ("ideal", MEASURED)])).children
    assert above.x_range is below.x_range
    assert [above.title.text, below.title.text] == ["measured", "ideal"]
    drawn = {each.data_source.data["name"][0]: each for each in above.renderers}
    assert drawn["forward"].data_source.data["stage"] == [0, 1]
    assert drawn["forward"].data_source.data["end"] == [1000, 2400]
    assert drawn["message"].data_source.data["label"] == ["-"]
    assert drawn["message"].glyph.height < drawn["forward"].glyph.height
    assert {item.label.value for item in above.legend[0].items} == {*drawn}
