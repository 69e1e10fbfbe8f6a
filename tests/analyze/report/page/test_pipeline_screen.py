"""The passes of a pipeline on the screen."""

from hpc3d.analyze.report.gantt import Panels
from hpc3d.analyze.report.page import plot_bokeh

ROWS = [
    [(0.0, 1.0, "F", "0"), (1.0, 1.4, "message", ""), (3.0, 5.0, "BW", "0")],
    [(1.4, 2.4, "F", "0"), (2.4, 3.0, "BW", "0")],
]


def test_panels_share_their_time_and_say_what_a_pass_is():
    above, below = plot_bokeh.draw(Panels([("measured", ROWS), ("ideal", ROWS)])).children
    assert above.x_range is below.x_range
    assert [above.title.text, below.title.text] == ["measured", "ideal"]
    forward, backward, message = (each.data_source.data for each in above.renderers)
    assert forward["stage"] == [0, 1] and forward["start"] == [0, 1400]
    assert backward["name"] == ["backward"] * 2 and backward["took"][0] == 2000
    assert message["label"] == ["-"]
    assert above.renderers[2].glyph.height < above.renderers[0].glyph.height
    assert [item.label.value for item in above.legend[0].items] == ["forward", "backward", "message"]
