"""The HTML report: complete, self-contained, and safe for any names in a trace."""

import csv
import re
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace

import h5py
import numpy as np
import pytest

from hpc3d import trace
from hpc3d.analyze.report import charts, figure_list, html
from hpc3d.analyze.report.cards import cards
from hpc3d.analyze.report.expert_words import in_words
from hpc3d.analyze.report.run_analysis import analyze_run, compare
from hpc3d.analyze.report.run_tables import OF_A_RUN
from hpc3d.analyze.report.table_format import in_markdown
from hpc3d.analyze.report.table_notes import MEANING
from hpc3d.analyze.report.write import write
from hpc3d.trace.annotations import write_prediction
from tests.analyze.delayed_runs import trained
from tests.analyze.small import ROWS, small

STATIC = ("png", "svg")  # formats of figure files, which the page contains for printing
PIPELINE = {"mesh__p": 2, "mesh__x": 2, "parallel__microbatches": 2, "parallel__schedule": "1f1b"}
PIPELINE |= {"model__layers": 2}
VOID = {"meta", "img", "input", "br"}
HOSTILE = (
    r"/../$\frac</script><script>alert(1)</script><img src=http://example.org/x onerror=alert(2)>"
)


class Reader(HTMLParser):
    """HTML parser that stores elements, attributes and text, and rejects unclosed elements."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.values, self.words = [], Counter(), [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.values += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & {*self.open}:
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


OF_EXPERTS = {
    "expert_cost": ("Cost of expert load imbalance", "1 row"),
    "experts": ("Expert load", "8 rows"),
    "routers": ("Expert load by step", "6 rows"),
    "exchanges": ("Dispatch and combine", "4 rows"),
}
EVALUATION = {"step": 1, "loss": 2.5, "tokens": 96, "accuracy": 0.25, "seconds": 0.5}
OF_A_TEXT = {"step": 1, "text": 0, "loss": 2.5, "tokens": 96, "accuracy": 0.25}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Report of a real pipeline with 2 stages on 4 ranks."""
    out = tmp_path_factory.mktemp("report")
    trained(out / "run", 4, **PIPELINE).close()
    whole = {"step": [-1], "stage": [-1], "rank": [-1]}
    write_prediction(out / "run" / "trace.h5", {"quantity": ["step_s"], "value": [0.5]} | whole)
    with h5py.File(out / "run" / "trace.h5", "r+") as file:  # the last update is between steps
        file["events/step"][np.flatnonzero(file["events/seq"][:] < 0)[-1]] = -1
        for table, row in (("evaluation", EVALUATION), ("validation", OF_A_TEXT)):
            for name, value in row.items():
                file[f"{table}/{name}"].resize(1, axis=0)
                file[f"{table}/{name}"][0] = value
    with trace.open(out / "run") as opened:
        write(compare([opened], [analyze_run(opened, peak=1e9)]), out, formats=STATIC)
    return out


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_page_and_text_end_with_the_papers_to_cite(page, folder):
    end = page[page.index('id="cite"') :]
    assert "@misc{harlap2018," in end and "Harlap, Aaron" in end and "<section" not in end
    text = (folder / "report.md").read_text()
    assert text.rstrip().endswith("```") and "![" not in text[text.index("## Papers to cite") :]


@pytest.mark.slow
def test_evaluation_has_a_card_and_a_table_row(page):
    text = Reader(page).text
    assert "validation 2.5000 nats per token after step 1" in text
    assert "2.500000 12.1825 25.0% 96 500" in text


@pytest.mark.slow
def test_expert_section_appears_only_for_expert_models(page, tmp_path):
    assert "experts-1" not in page and "capacity was unused" not in Reader(page).text
    layout = {"mesh__e": 2, "model__layers": 2, "model__experts": 4, "model__capacity": 1.0}
    with trained(tmp_path / "run", 2, **layout) as opened:
        run = analyze_run(opened)
        text = reported(opened, tmp_path)
    assert '<a href="#experts-1">Experts</a>' in text and '<h2 id="experts-1">Experts</h2>' in text
    words, cost = Reader(text).text, in_words(run.tables["expert_cost"][0])
    assert cost in words and "In dispatch and combine, ranks waited" in cost
    for title, rows in OF_EXPERTS.values():
        assert f"{title} {rows} definitions" in words
    assert '<img class="both" alt="Expert load: ' in text
    assert in_markdown(cost) in (tmp_path / "report.md").read_text()
    assert (tmp_path / "tables" / "exchanges.csv").exists()


def reported(opened, out):
    """Return the page of one trace."""
    write(compare([opened], [analyze_run(opened)]), out)
    return (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_page_makes_no_network_requests(page):
    found = Reader(page).values
    addresses = [value for _, key, value in found if key in ("src", "href", "action", "poster")]
    assert all(value.startswith(("data:image/", "#")) for value in addresses)
    assert not {("link", key) for tag, key, _ in found if tag in ("link", "iframe", "object")}
    (policy,) = [value for *_, value in found if value and value.startswith("default-src")]
    assert policy.startswith("default-src 'none';") and "http" not in policy
    style = page[page.index("<style>") : page.index("</style>")]
    assert "url(" not in style and "@import" not in style


def test_page_is_smaller_than_3_mb(page):
    assert len(page) < 3e6


def test_every_link_target_exists(page):
    found = Reader(page).values
    names = [value for _, key, value in found if key == "id"]
    assert len(names) == len(set(names))
    assert {value[1:] for _, key, value in found if key == "href"} <= {*names}


def test_page_has_every_table_with_its_definitions(page):
    text = Reader(page).text
    for spec in OF_A_RUN:
        shown = spec.name not in {*OF_EXPERTS, "copies", "attempts"}
        if spec.rows_shown >= 0 and shown:
            assert re.search(rf"{re.escape(spec.title)} \d+ rows? definitions", text), spec.name
        words = " ".join(html.prose(MEANING[spec.name]).split())
        assert (words in " ".join(page.split())) == shown, spec.name
    assert 'id="meaning-runs"' not in page, "a single run is not compared"
    label = "3d (shards only m), 1f1b, p=2 x=2"
    for word in ("12.5%", "F [ms]", "MFU", "algbw", "arrives last", label):
        assert word in text or word == "12.5%"


def test_page_has_every_figure_for_screen_and_print(page, folder):
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert {"loss", "timeline", "ranks", "phases", "path", "waits", "stragglers"} < names
    assert {"traffic", "traffic-p", "traffic-x", "pipeline", "memory"} < names
    found = Reader(page)
    assert found.tags["img"] == found.tags["figure"] == len(names)
    kinds = Counter(value for tag, key, value in found.values if (tag, key) == ("img", "class"))
    assert kinds == {"paper": len(names)}
    assert {path.suffix for path in (folder / "figures").iterdir()} == {".png", ".svg"}
    assert (folder / "report.md").read_text().count("](figures/") == len(names)


def test_summary_cards_of_a_small_run(tmp_path):
    with small(tmp_path / "trace.h5", config='name = "small"') as opened:
        run = analyze_run(opened, peak=1e12)
        found = {title: (value, note) for title, value, note in cards(run)}
        assert run.missing == []
        assert found["step"] == ("10.0 ms", run.about["averages"])
    assert found["straggler"] == ("unknown", "too few steps to decide")
    assert found["imbalance"][0] == "1.273"  # 7 / ((4 + 7) / 2)
    assert found["communication"][0] == "35.0%"  # (5 + 2) of 20 ms
    assert found["communication"][1].startswith("waiting 15.0%")
    assert found["loss"][0] == "2.5000"
    assert found["memory"][0] == "40B"
    assert found["MFU"][1] == "HFU 45.0%"  # 9 GFLOP in 10 ms on 2 ranks of 1 TFLOP/s
    assert "pipeline bubble" not in found


def test_simulated_run_has_no_straggler_card(tmp_path):
    with small(tmp_path / "trace.h5", config='name = "small"', kind="simulated") as opened:
        titles = [title for title, *_ in cards(analyze_run(opened))]
    assert "straggler" not in titles and "imbalance" in titles


def test_page_without_figure_files_has_only_interactive_plots(tmp_path):
    with small(tmp_path / "trace.h5") as opened:
        found = Reader(reported(opened, tmp_path))
    assert "img" not in found.tags and found.tags["figure"] > 5
    assert "add --figures svg" in found.text
    assert not (tmp_path / "figures").exists()
    assert "](figures/" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_memory_chart_omits_the_total():
    rows = [
        {"rank": 0, "parameter": 30, "activation": 50, "all": 60},
        {"rank": 1, "parameter": 20, "activation": 70, "all": 75},
        {"rank": None, "parameter": 50, "activation": 120, "all": 135},
    ]
    run = SimpleNamespace(tables={"memory_ranks": rows})
    assert [*charts.memory(run).parts] == ["parameter", "activation"]


@pytest.mark.slow
def test_names_from_the_trace_are_escaped(tmp_path):
    path = tmp_path / "trace.h5"
    small(path, run_id=HOSTILE, missing=HOSTILE, device=HOSTILE).close()
    with h5py.File(path, "r+") as file:
        names = file["strings/name"]
        names[:] = [f"{HOSTILE} {number}" for number in range(len(names))]
        file["groups/axis"][:] = HOSTILE
    with trace.open(path) as opened:
        text = reported(opened, tmp_path / "out")
    found = Reader(text)
    with small(tmp_path / "plain.h5") as opened:
        plain = Reader(reported(opened, tmp_path / "plain"))
    assert found.tags["script"] == plain.tags["script"]
    assert "http://example.org/x" not in [value for *_, value in found.values]
    assert found.text.count(HOSTILE) >= 4


@pytest.mark.slow
def test_missing_ranks_are_reported_at_the_top(tmp_path):
    with small(tmp_path / "trace.h5", missing="rank 7: no segment") as opened:
        text = Reader(reported(opened, tmp_path / "out")).text
    assert "The trace is incomplete. Missing: rank 7: no segment" in text
    assert "Nothing is missing" not in text


@pytest.mark.slow
def test_inconsistent_trace_is_reported(tmp_path):
    late = {**ROWS[0], "t_start": ROWS[0]["t_start"] + 500_000_000}
    with small(tmp_path / "trace.h5") as sound, small(tmp_path / "two.h5", [late]) as other:
        assert "is inconsistent" not in reported(sound, tmp_path / "sound")
        text = Reader(reported(other, tmp_path / "other")).text
    assert "The trace is inconsistent: /events:" in text
    assert "is inconsistent" in (tmp_path / "other" / "report.md").read_text()


@pytest.mark.slow
def test_page_of_several_runs_has_a_section_per_run(tmp_path):
    with small(tmp_path / "one.h5") as one, small(tmp_path / "two.h5", run_id="two") as two:
        report = compare([one, two], [analyze_run(each) for each in (one, two)])
        report.differing["layout"]["mesh.<d>"] = "1 in one; 2 in two"
        write(report, tmp_path, formats=STATIC)
    found = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert {"comparison", "run-1", "run-2"} <= {
        value for _, key, value in found.values if key == "id"
    }
    assert "Differences in layout (mesh and techniques) mesh.<d>: 1 in one; 2 in two" in found.text
    assert "Differences in work" not in found.text
    assert "Differences from the first run" in found.text and "Speedup" not in found.text
    stems = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert {"loss", "runs", "timeline-1", "timeline-2"} <= stems
    assert found.tags["img"] == len(stems)


@pytest.mark.slow
def test_cpu_time_report_omits_comparisons_between_ranks(tmp_path):
    with small(tmp_path / "trace.h5", config='[trace]\nclock = "cpu"\n') as opened:
        run = analyze_run(opened)
        report = compare([opened], [run])
    (line,) = run.missing
    assert line.startswith("wall-clock times: each rank measured its own CPU time")
    names = {picture.name for picture in figure_list.of_run(run)}
    assert names == {"ranks", "phases", "traffic", "traffic-x", "hosts", "memory"}
    assert not any(run.tables[name] for name in ("path", "waits", "stragglers", "collectives"))
    for row, exposed in zip(run.tables["ranks"], (5e-3, 2e-3)):
        assert row["wait_s"] is row["transfer_s"] is None
        assert row["exposed_s"] == pytest.approx(exposed)
    parts = charts.ranks(run).parts
    assert parts.keys() == {"compute", "exposed", "unrecorded"}
    assert sum(values[0] for _, values in parts.values()) == pytest.approx(10)
    write(report, tmp_path)
    page = Reader((tmp_path / "report.html").read_text(encoding="utf-8"))
    shown = page.text.split("Definitions")[1]
    for text in (shown, (tmp_path / "report.md").read_text(encoding="utf-8")):
        assert line in text
        assert not any(word in text for word in ("wait [ms]", "transfer [ms]", "waiting", "arrow"))
    assert {path.stem for path in (tmp_path / "tables").iterdir()}.isdisjoint(
        ("path", "waits", "stragglers", "collectives", "pipeline")
    )
    with (tmp_path / "tables/ranks.csv").open(newline="") as file:
        assert {row[key] for row in csv.DictReader(file) for key in ("wait_s", "transfer_s")} == {
            ""
        }


def test_cpu_time_runs_are_not_compared(tmp_path):
    wall, processor = "", '[trace]\nclock = "cpu"\n'
    for place, configs in enumerate([(wall, processor), (wall, wall), (processor, processor)]):
        paths = [tmp_path / f"{place}-{number}.h5" for number in (1, 2)]
        traces = [small(path, config=config) for path, config in zip(paths, configs)]
        report = compare(traces, [analyze_run(each) for each in traces])
        compared = [bool(report.tables[name]) for name in ("scaling", "differences")]
        assert compared == [processor not in configs] * 2
        told = ["differences between runs" in " ".join(run.missing) for run in report.runs]
        assert told == [config == processor for config in configs]


def test_cpu_time_run_has_no_rates(tmp_path):
    config = '[trace]\nclock = "cpu"\n'
    with small(tmp_path / "trace.h5", config=config) as opened:
        tables = analyze_run(opened, peak=1e9).tables
    rates = [tables["step"][0]["tokens_per_s"]]
    rates += [tables["efficiency"][0][key] for key in ("recorded_flop_per_s", "mfu", "hfu")]
    assert rates == [None] * 4
    assert tables["efficiency"][0]["recorded_flop"] == 9e9


def test_dropped_events_are_reported(tmp_path):
    small(tmp_path / "trace.h5").close()
    with h5py.File(tmp_path / "trace.h5", "r+") as file:
        file["ranks/dropped"][1] = 7
    with trace.open(tmp_path / "trace.h5") as opened:
        (line,) = analyze_run(opened).missing
    assert line.startswith("dropped events of rank 1, so only the step, loss and memory tables")


@pytest.mark.parametrize(
    ("cores", "text"),
    [(0, None), (1, "1 for 2 ranks per host: ranks share cores"), (2, "2 for 2 ranks per host")],
)
def test_ranks_that_share_cores_are_reported(tmp_path, cores, text):
    with small(tmp_path / "trace.h5", hosts=["a", "a"], cores=cores) as opened:
        found = analyze_run(opened).about.get("cores")
    assert (found and found[: len(text)]) == text
    assert not text or ("share cores" in found) == (cores == 1)


def test_missing_step_is_rejected(tmp_path):
    with small(tmp_path / "trace.h5") as opened, pytest.raises(ValueError, match="step 5"):
        analyze_run(opened, step=5)


def test_prose_converts_text_to_paragraphs():
    found = "<p>One <b>heading</b>\ngoes on.</p>\n<p>Two &lt;b&gt;.</p>"
    assert html.prose("One `heading`\ngoes on.\n\nTwo <b>.") == found


def test_page_contains_the_picture_of_the_layout(page):
    (described,) = re.findall("<desc>(.*?)</desc>", page, re.DOTALL)
    lines = described.split("\n")
    assert "p 2 by layer by layer by layer by layer" in lines
    layers = [
        re.sub(r"[\d ,]+ (?=[a-z])", "", line, count=1)
        for line in lines
        if re.match(r"\d \d \d ", line)
    ]
    assert layers == ["embedding, layer 0"] * 2 + ["layer 1, head"] * 2
