"""Format of table values."""

import csv
import re

import pytest

from hpc3d.analyze.report import table_format
from hpc3d.analyze.report.comparison_tables import over_runs
from hpc3d.analyze.report.table_format import ColumnSpec, TableSpec, latex, markdown

FIELDS = (
    ColumnSpec("name", "name"),
    ColumnSpec("seconds", "time [ms]", table_format.milliseconds),
    ColumnSpec("rank", "rank", table_format.number),
)
ROWS = [
    {"name": "gemm", "seconds": 1.5, "rank": 3},
    {"name": "50% of a_b | c", "seconds": None, "rank": -1},
]


def source():
    """Return the meaning of the numbers."""


def test_markdown_table_is_aligned_and_escapes_separators():
    assert markdown(FIELDS, ROWS).splitlines() == [
        "| name            | time [ms] | rank |",
        "| --------------- | --------: | ---: |",
        "| gemm            |     1,500 |    3 |",
        r"| 50% of a_b \| c |         - |    - |",
    ]


def test_rule_of_a_narrow_column_has_a_dash():
    fields = (ColumnSpec("d", "d", "{}".format), ColumnSpec("s", "s"))
    rule = markdown(fields, [{"d": 4, "s": "a"}]).splitlines()[1]
    assert all(re.fullmatch(r" -+:? ", cell) for cell in rule.strip("|").split("|"))


def test_latex_table_uses_booktabs_and_escapes_special_characters():
    assert latex(FIELDS, ROWS).splitlines() == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"name & time [ms] & rank \\",
        r"\midrule",
        r"gemm & 1,500 & 3 \\",
        r"50\% of a\_b | c & - & - \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]
    worst = latex(FIELDS[:1], [{"name": r"\input{x} # $ & ~ ^ < \\"}]).splitlines()[4]
    assert worst == (
        r"\textbackslash{}input\{x\} \# \$ \& \textasciitilde{} \textasciicircum{} <"
        r" \textbackslash{}\textbackslash{} \\"
    )


def test_latex_row_does_not_start_with_an_argument():
    rows = [{"name": "[2, 1]"}, {"name": "*"}, {"name": "a[2]"}]
    assert latex(FIELDS[:1], rows).splitlines()[4:7] == [r"{}[2, 1] \\", r"{}* \\", r"a[2] \\"]


def test_csv_files_keep_all_columns_and_text_omits_unknown_ones(tmp_path):
    table_format.write(TableSpec("mine", "Mine", FIELDS, source), ROWS, tmp_path)
    with (tmp_path / "mine.csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["name", "seconds", "rank"],
            ["gemm", "1.5", "3"],
            ["50% of a_b | c", "", "-1"],
        ]
    unknown = [{**row, "seconds": None, "more": 1} for row in ROWS]
    table_format.write(TableSpec("mine", "Mine", FIELDS, source), [*ROWS, *unknown], tmp_path)
    assert (tmp_path / "mine.csv").read_text().splitlines()[0] == "name,seconds,rank,more"
    table_format.write(TableSpec("mine", "Mine", FIELDS, source), unknown, tmp_path)
    assert "time" not in (tmp_path / "mine.md").read_text()


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (table_format.milliseconds, 1.23456, "1,230"),
        (table_format.microseconds, 1.23e-6, "1.23"),
        (table_format.digits, 0.0, "0"),
        (table_format.digits, 9.996, "10.0"),
        (table_format.digits, 0.001234, "0.00123"),
        (table_format.digits, -123456.0, "-123,000"),
        (table_format.seconds, 18.456, "18.5 s"),
        (table_format.seconds, 0.0123, "12.3 ms"),
        (table_format.seconds, 1.5e-5, "15.0 us"),
        (table_format.seconds, 0.0, "0 us"),
        (table_format.percent, 0.1234, "12.3%"),
        (table_format.count, 2.5, "2.5"),
        (table_format.integer, 12345, "12,345"),
        (table_format.number, 0, "0"),
        (table_format.number, -1, "-"),
        (table_format.ratio, 1.0004, "1.000"),
        (table_format.prefixed, 12345678, "12.3 M"),
        (table_format.prefixed, 999, "999"),
        (table_format.layer, -1, "embedding, head"),
        (table_format.layer, 0, "0"),
        (table_format.layer, "", ""),
        (table_format.prefixed, 1.5e13, "15.0 T"),
        (table_format.prefixed, -2e9, "-2.00 G"),
        (table_format.change, 0.1234, "+12.3%"),
        (table_format.change, 0.0, "0%"),
    ],
)
def test_number_formats(write, value, text):
    assert write(value) == text


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [(3.5312, 0.2412, "3.53 ± 0.24"), (3.5312, None, "3.5312"), (3.5312, 1e-10, "3.5312")],
)
def test_mean_has_the_half_width_of_its_interval(mean, half, text):
    field = table_format.ColumnSpec("loss", "mean loss [nat]", "{:.4f}".format, "loss_half")
    row = {"loss": mean, "loss_half": half}
    assert field.text(row) == text
    assert text in table_format.latex([field], [row])
    assert field.text({"loss": None}) == "-"


def test_latex_tables_of_a_comparison_have_few_columns(tmp_path):
    """At most 9 columns fit into the width of a page. The other columns are in the CSV file."""
    heads = {}
    for spec in over_runs(list("abcdefgh")):
        assert {*spec.in_latex} <= {field.key for field in spec.fields}
        row = {field.key: "-" if field.is_text else 1 for field in spec.fields}
        table_format.write(spec, [row], tmp_path)
        heads[spec.name] = (tmp_path / f"{spec.name}.tex").read_text().splitlines()[2].split(" & ")
        with (tmp_path / f"{spec.name}.csv").open(newline="") as file:
            assert next(csv.reader(file)) == [*row]
    few = {name: len(heads[name]) for name in ("runs", "scaling", "gains", "received")}
    assert few == {"runs": 9, "scaling": 9, "gains": 8, "received": 8}
    shown = "run", "step [ms]", "speedup", "reference"
    assert [heads["scaling"][column] for column in (0, 2, 4, 7)] == [*shown]
    assert len(heads["seeds"]) == 6  # all columns


def test_text_table_of_many_runs_shows_the_first_columns():
    for labels, shown in (("abcdef", "abcdef"), ("abcdefgh", "abcdef")):
        spec = next(each for each in over_runs([*labels]) if each.name == "received")
        bytes_of = [field.heading[0] for field in spec.narrowed().fields if "[B]" in field.heading]
        assert bytes_of == [*shown]
        assert len(spec.fields) == 1 + 3 * len(labels)
        assert spec.narrowed().fields[-1].heading == "time [ms]"
