"""The report cites the papers that a run uses, and CITATION.cff lists all of them."""

import re

import pytest
import yaml

from hpc3d.analyze.citations import PAPERS, bibliography
from hpc3d.config.input_file import CONSTANTS, Config
from hpc3d.config.load import load, to_toml
from hpc3d.config.resolve import resolve
from hpc3d.pipeline.schedule import SCHEDULES
from hpc3d.tensor.split import SCHEMES
from tests.mpi import ROOT


def cited(*words, ranks):
    """Return the keys of the papers that a run on `ranks` ranks with these options cites."""
    config = resolve(load("gpt-serial", [word for each in words for word in each.split()]), ranks)
    return re.findall(r"^@\w+\{(\w+),$", bibliography([to_toml(config)]), re.M)


def address(paper):
    """Return the web address of a paper, or "" if its entry has none."""
    if paper.arxiv:
        return f"https://arxiv.org/abs/{paper.arxiv}"
    return "".join(re.findall(r"url = \{(.+)\}", paper.where))


@pytest.mark.parametrize(
    ("words", "ranks", "keys"),
    [
        ([], 1, ["loshchilov2017"]),
        (["--mesh.x 2"], 2, ["bian2021", "loshchilov2017"]),
        (
            ["--parallel.scheme 1d-sequence --mesh.x 2"],
            2,
            ["shoeybi2019", "korthikanti2022", "loshchilov2017"],
        ),
        (
            ["--mesh.p 2 --parallel.schedule zb-h1 --parallel.microbatches 4"],
            2,
            ["qi2023", "loshchilov2017"],
        ),
        (
            ["--mesh.d 2 --parallel.zero 2 --train.optimizer adafactor"],
            2,
            ["rajbhandari2019", "shazeer2018"],
        ),
        (["--mesh.c 2 --train.optimizer sgd"], 2, ["liu2023"]),
        (
            ["--mesh.d 2 --train.optimizer muon"],
            2,
            ["loshchilov2017", "jordan2024", "liu2025"],
        ),
        (["--mesh.e 2 --model.experts 4 --train.optimizer lion"], 2, ["fedus2021", "chen2023"]),
    ],
)
def test_run_cites_the_papers_of_its_techniques_only(words, ranks, keys):
    assert cited(*words, ranks=ranks) == keys


def test_several_runs_cite_a_paper_once():
    text = to_toml(Config())
    assert bibliography([text, text, ""]) == bibliography([text])
    assert bibliography(["", "not = 'a configuration'", "["]) == ""


def test_entry_is_valid_bibtex():
    for paper in PAPERS:
        entry = paper.bibtex()
        assert entry.count("{") == entry.count("}")
        assert re.fullmatch(r"@\w+\{\w+,\n(  \w+ = \{.+\},\n)+  \w+ = \{.+\}\n\}", entry), entry
    assert len({paper.key for paper in PAPERS}) == len(PAPERS)


def test_every_scheme_schedule_and_optimizer_has_a_paper():
    schemes = [cited(f"--parallel.scheme {each} --mesh.x 2", ranks=2) for each in ("1d", "3d")]
    assert all(len(keys) == 2 for keys in schemes)
    used = [paper.used for paper in PAPERS]
    plain = ["--train.optimizer", "sgd"]
    for name in SCHEMES:
        config = load(None, ["--parallel.scheme", name, "--mesh.x", "2", *plain])
        assert any(each(config) for each in used), name
    for name in SCHEDULES:
        config = load(None, ["--parallel.schedule", name, "--mesh.p", "2", *plain])
        assert name == "none" or any(each(config) for each in used), name
    for name in CONSTANTS:
        config = load(None, ["--train.optimizer", name])
        assert name == "sgd" or any(each(config) for each in used), name


def test_citation_file_lists_the_same_papers():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["references"]
    listed = {
        each["title"]: (
            " and ".join(
                f"{{{one['name']}}}"
                if "name" in one
                else f"{one['family-names']}, {one['given-names']}"
                for one in each["authors"]
            ),
            each["year"],
            each.get("url", ""),
        )
        for each in found
    }
    assert listed == {each.title: (each.authors, each.year, address(each)) for each in PAPERS}
