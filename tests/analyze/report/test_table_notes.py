"""Notes below the tables."""

import re

from hpc3d.analyze.report.comparison_tables import over_runs
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_notes import MEANING


def test_every_table_explains_its_columns():
    specs = (*over_runs(["one", "other"]), *OF_A_RUN)
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    for spec in specs:
        assert re.fullmatch(r"[a-z_]+", spec.name)
        text = MEANING[spec.name]
        named = {" ".join(each.split()) for each in re.findall(r"`([^`]+)`", text)}
        assert named <= {field.heading for field in spec.fields}, spec.name
    assert MEANING.keys() == {*names}
