"""What is said below each table."""

import re

from hpc3d.analyze.report.comparison_tables import OVER_RUNS
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_notes import MEANING


def test_every_table_says_what_its_numbers_mean():
    names = [spec.name for spec in (*OVER_RUNS, *OF_A_RUN)]
    assert len(names) == len(set(names))
    for spec in (*OVER_RUNS, *OF_A_RUN):
        assert re.fullmatch(r"[a-z_]+", spec.name)
        text = MEANING[spec.name]
        named = {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", text)}
        assert named <= {field.heading for field in spec.fields}, spec.name
    assert MEANING.keys() == {*names}
