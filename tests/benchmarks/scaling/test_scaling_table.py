"""Growth and findings of a scaling table."""

import pytest

from hpc3d.benchmarks.scaling.scaling_table import findings, with_growth


def rows(**times):
    """Rows of predicted times per sequence: the keyword d1_64 is scheme 1d on 64 ranks."""
    schemes = {"d1": "1d", "d2": "2d-summa", "d3": "3d"}
    split = [(*key.split("_"), seconds) for key, seconds in times.items()]
    return with_growth(
        [
            {
                "kind": "predicted",
                "scheme": schemes[scheme],
                "ranks": int(ranks),
                "sequence_s": seconds,
            }
            for scheme, ranks, seconds in split
        ]
    )


def test_growth_is_relative_to_the_first_row_of_a_scheme():
    assert [row["growth"] for row in rows(d1_1=2.0, d1_64=5.0, d3_1=4.0, d3_64=6.0)] == [
        *(1, 2.5),
        *(1, 1.5),
    ]


@pytest.mark.parametrize(("last", "verdict"), [(6.0, "holds"), (16.0, "does not hold")])
def test_findings_compare_the_rows_with_the_claims(last, verdict):
    table = rows(d1_1=2.0, d1_64=6.0, d2_1=2.0, d2_64=5.0, d3_1=4.0, d3_64=last)
    speedups, growth = findings(table, weak=True)
    assert f"{6 / last:.2f} times as fast as 1d (paper: 2.32)" in speedups
    assert f"{5 / last:.2f} times as fast as 2d-summa (paper: 1.57)" in speedups
    assert growth.endswith(verdict)
    assert len([*findings(table, weak=False)]) == 1


def test_claims_about_the_cube_need_a_cube():
    assert not [*findings(rows(d1_1=2.0, d1_4=6.0), weak=True)]
