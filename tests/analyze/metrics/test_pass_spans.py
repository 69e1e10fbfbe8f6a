"""Time spans of the passes of a timeline."""

from hpc3d.analyze.metrics.pass_spans import spans
from hpc3d.pipeline.schedule import instruction_streams
from hpc3d.pipeline.timeline import Cost, timeline


def test_spans_of_a_simulated_timeline():
    rows = spans(timeline(*instruction_streams("pipedream", 2, 2), Cost(1, 1, 1)))
    assert rows[1][:3] == [(1, 2, "F", "0"), (2, 4, "BW", "0"), (4, 4, "step", "")]
    chunks = spans(timeline(*instruction_streams("zb-v", 1, 1, 2), Cost(2, 2, 2)))
    assert [span.kind for span in chunks[0]] == ["F", "1F", "1B", "1W", "B", "W"]
