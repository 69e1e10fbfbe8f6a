"""Machine files: read, written, and rejected with one line."""

import re
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc3d.predict.machine.collective_costs import ALGORITHMS, Protocol
from hpc3d.predict.machine.machine import (
    TYPES,
    AttentionRates,
    CallTable,
    Errors,
    Link,
    Machine,
    Rates,
)
from hpc3d.predict.machine.machine_file import dumps, load
from tests.elided import elided
from tests.predict.machine.test_machine import CLUSTER, FAR, NEAR, SHIPPED, TABLE


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_machine_is_complete(path):
    machine = load(path)
    assert machine.name == path.stem
    for rates in machine.gemm.values():
        assert max(rates.rate) < rates.peak
    if machine.ranks_per_node > 1:  # otherwise, there is no link inside a node
        assert machine.links[0].ranks == machine.ranks_per_node
        assert machine.links[0].bandwidth > machine.links[1].bandwidth
    assert 0 < machine.product(4096, 4096, 4096, "float16") < 2e-3


def test_all_machines_are_shipped():
    assert {path.stem for path in SHIPPED} >= {"v100-4x16", "a100-selene", "h100", "h200"}


TEXT = dumps(replace(CLUSTER, measured=(TABLE,)))
CURVE = TEXT[TEXT.index("flop = ") : TEXT.index("\n\n", TEXT.index("flop = ")) + 1]


def said(text, tmp_path):
    """Return the error lines for this text, without the path at their beginning."""
    path = tmp_path / "machine.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        load(path)
    lines = str(error.value).splitlines()
    assert all(line.startswith(f"{path}: ") for line in lines)
    return [line.removeprefix(f"{path}: ") for line in lines]


def test_machine_file_of_these_tests_is_valid(tmp_path):
    path = tmp_path / "machine.toml"
    path.write_text(TEXT, encoding="utf-8")
    assert load(path) == replace(CLUSTER, measured=(TABLE,))


# The lines from `cores` to `host_s`.
CROWDED = TEXT[TEXT.index("cores = 0\n") : TEXT.index("max_fused_head_dim")]
assert CROWDED.endswith("contention = 1.0\nhost_s = 0.0\n")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("launch_s = 5e-06\n", "", "launch_s: missing"),
        ("ranks_per_node = 4", "ranks_per_node = 2.5", "ranks_per_node: ... 2.5;"),
        ("cores = 0", "cores = 2025-01-02", "cores: ... '2025-0"),
        ("cores = 0", "cores = -1", "cores = -1.0: ... 0 ("),
        ("cores = 0", "core = 0\ncores = 0", "core: ... cores?"),
        ('name = "16 nodes of 4"', 'name = " "', "name = ' ': ... nonempty"),
        ("ranks_per_node = 4", "ranks_per_node = 0", "ranks_per_node = 0: ... 1"),
        ("memory_gb = 16", "memory_gb = nan", "memory_gb = nan: ... positive"),
        ("launch_s = 5e-06", "launch_s = -1.0", "launch_s = -1.0: ... 0 "),
        ("wakeup_s = 0.0", "wakeup_s = -1.0", "wakeup_s = -1.0: ... 0 "),
        ("dispatch_s = 0.0", "dispatch_s = -1.0", "dispatch_s = -1.0: ... 0 "),
        ("host_s = 0.0", "host_s = -1.0", "host_s = -1.0: ... 0 "),
        (
            CROWDED,
            CROWDED.replace("= 0\n", "= 2\n").replace("host_s = 0.0", "host_s = 1e-5"),
            "host_s = 1e-05: ... cores",
        ),
        ("contention = 1.0", "contention = 0.9", "contention = 0.9: ... 1 ("),
        (
            CROWDED,
            CROWDED.replace("= 0\n", "= 2\n").replace("n = 1.0", "n = 1.5"),
            "contention = 1.5: ... cores",
        ),
        (
            "max_fused_head_dim = 128",
            "max_fused_head_dim = -1",
            "max_fused_head_dim = -1: ... 0 (",
        ),
        ("softmax = ", "softmax = -", "kernels.softmax = -500000000000.0: ... 1"),
        ("[gemm.float32]", "[gemm.fp32]", "gemm.fp32: ... float64,"),
        ("rate = [1", "rate = [0.0, 1", "gemm.float32: flop ... 2 ... rate ... 3;"),
        ("rate = [1", "rate = [-1", "gemm.float32: flop and rate ... positive"),
        ("flop = [1", "flop = [9000000", "gemm.float32.flop: ... ascend"),
        ("flop = [1", "flop = [10000000000.0, 1", "gemm.float32: flop ... 3 ... rate ... 2;"),
        ("flop = [100000000.0", "flop = [10000000000.0", "gemm.float32.flop: ... ascend"),
        ("peak = 1", "peak = 2.0 # 1", "gemm.float32.peak = 2: ... rate"),
        (CURVE, "flop = []\nrate = []\n", "gemm.float32"),
        ("launch_s = 5e-06", "launch_s = 1e9", "launch_s = 1000000000.0: ... 0"),
        ("peak = 1", "peak = 0.0 # 1", "gemm.float32.peak = 0.0: ... 1"),
        ("peak =", "peek =", "gemm.float32.peek: ... peak?"),
        ("ranks = 0", "ranks = 64", "links.1.ranks = 64: ... 0"),
        ("ranks = 4\n", "ranks = 0\n", "links.0.ranks = 0: ... 2 (... 0"),
        ("alpha_s = 2e-06", "alpha_s = true", "links.0.alpha_s: ... true"),
        ("alpha_s = 2e-06", "alpha_s = inf", "links.0.alpha_s = inf: ... 0"),
        ("\nbandwidth = 1", "\nbandwidth = -1", "links.0.bandwidth = -100000000000.0: "),
        ("ndwidth = 0.0", "ndwidth = -2.0", "links.0.node_bandwidth = -2.0: ... 0"),
        ("pair_bandwidth = 0.0", "pair_bandwidth = -1", "links.0.pair_bandwidth = -1.0: "),
        (
            "oversubscription = 1.0",
            "oversubscription = 2.0",
            "links.0.oversubscription = 2.0: ...",
        ),
        ("oversubscription = 1.0", "oversubscription = 0.5", "links.0.oversubscription = 0.5: "),
        ('"all_gather"', '"gather"', "measured.0.op = 'gather': ... all_gather,"),
        ("members = 4", "members = 1", "measured.0.members = 1: ... 2"),
        ("stride = 1", "stride = -1", "measured.0.stride = -1: ... 0"),
        ('"alone"', '"both"', "measured.0.groups: ... 'alone' or 'at once', ... 'both'"),
        ("bytes = [1000.0, ", "bytes = [", "measured.0: bytes ... 1 ... seconds ... 2;"),
        (
            "[[measured]]",
            TEXT[TEXT.index("[[meas") :] + "[[measured]]",
            "measured: op = 'all_gather', members = 4, ... 2 times",
        ),
    ],
)
def test_invalid_machine_file_is_rejected_in_one_line(old, new, line, tmp_path):
    assert old in TEXT
    lines = said(TEXT.replace(old, new, 1), tmp_path)
    expected = 2 if "peek" in new else 1  # the key that is unknown, and the one that is missing
    assert len(lines) == expected
    assert any(re.match(elided(line), each) for each in lines), lines


def test_links_must_be_ordered_from_inner_to_outer(tmp_path):
    links = (NEAR, replace(NEAR, ranks=6), FAR)
    (line,) = said(dumps(replace(CLUSTER, links=links)), tmp_path)
    assert re.match(elided("links.1.ranks = 6: ... multiple ... 4 "), line)
    without = dumps(replace(CLUSTER, links=()))
    (line,) = said(without, tmp_path)
    assert line.startswith("links: missing")
    (line,) = said("links = []\n" + without, tmp_path)
    assert re.match(elided("links: ... [[links]] ... ranks = 0"), line)


def test_measured_table_requires_two_points(tmp_path):
    bad = replace(CLUSTER, measured=(replace(TABLE, bytes=(1.0,), seconds=(1.0,)),))
    (line,) = said(dumps(bad), tmp_path)
    assert re.match(elided("measured.0: bytes ... 1 ... seconds ... 1;"), line)


def test_attention_rates_require_a_head_dimension_and_a_curve(tmp_path):
    table = dumps(
        replace(CLUSTER, attention=(AttentionRates(0, True, False, (2.0, 1.0), (1, 1)),))
    )
    assert said(table, tmp_path) == [
        "attention.0.head_dim = 0: must be at least 1",
        "attention.0.sequence: must be in ascending order; sort the values and remove duplicates",
    ]


def test_protocols_require_a_fraction_of_the_bandwidth(tmp_path):
    wrong = Protocol("LL", 1e-6, -1e-6, 1e-6, fraction=0)
    assert said(dumps(replace(CLUSTER, protocols=(wrong,))), tmp_path) == [
        "protocols.0.intra_node_s = -1e-06: must be at least 0",
        "protocols.0.fraction = 0: must be positive",
    ]


def test_errors_require_an_interval(tmp_path):
    wrong = Errors("sharded", 20, 1.2, 0.9), Errors("context", 20, 0.0, 0.9)
    lines = said(dumps(replace(CLUSTER, errors=wrong)), tmp_path)
    assert [line.partition(":")[0] for line in lines] == ["errors.0", "errors.1"]


def test_machine_requires_product_rates(tmp_path):
    (line,) = said("gemm = {}\n" + dumps(replace(CLUSTER, gemm={})), tmp_path)
    assert re.match(elided("gemm: ... [gemm.float32]"), line)


def test_all_errors_are_reported_together(tmp_path):
    bad = replace(
        CLUSTER, name="", cores=-1, launch_s=-1.0, links=(NEAR,), measured=(TABLE, TABLE)
    )
    keys = [line.split(" = ")[0].split(":")[0] for line in said(dumps(bad), tmp_path)]
    assert keys == ["name", "cores", "launch_s", "links.0.ranks", "measured"]


def test_empty_machine_file_is_rejected(tmp_path):
    assert "empty" in said("# nothing", tmp_path)[0]


def test_missing_machine_file_is_rejected():
    with pytest.raises(ValueError, match=r"^no-machine\.toml: "):
        load("no-machine.toml")


# Machines that are like others

SLOWER = """
like = "h100"
name = "slower"
memory_gb = 94

[gemm.bfloat16]
sustained = 600e12

[[links]]
ranks = 0
alpha_s = 20e-6
bandwidth = 10e9
"""


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def test_machine_inherits_the_numbers_that_its_file_omits(tmp_path):
    base, found = load("h100"), load(written(tmp_path / "slower.toml", SLOWER))
    halves = replace(base.gemm["bfloat16"], sustained=600e12)
    assert found == replace(
        base,
        name="slower",
        memory_gb=94,
        gemm=base.gemm | {"bfloat16": halves},
        links=(Link(0, 20e-6, 10e9),),
        errors=(),
    )


def test_machine_may_be_like_a_file_that_is_like_another(tmp_path):
    there = written(tmp_path / "slower.toml", SLOWER)
    text = f'like = "{there}"\nname = "slowest"\nlaunch_s = 1e-5\n'
    found = load(written(tmp_path / "slowest.toml", text))
    assert found == replace(load(there), name="slowest", launch_s=1e-5)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('like = "h10"\nname = "mine"', "like = h10: no such machine; did you mean h100? "),
        ("like = 3", "like = 3: must be the name or the file of a machine"),
        ('like = "h100"\ncores = 0', "name: missing; add it"),
        ('like = "h100"\nname = "mine"\ncore = 0', "core: unknown key; did you mean cores?"),
        ('likes = "h100"\n' + TEXT, "likes: unknown key; did you mean like?"),
        ('like = "h100"\nname = "mine"\n[gemm]\nbfloat16 = 1', "gemm.bfloat16: "),
    ],
)
def test_invalid_likeness_is_rejected_in_one_line(text, line, tmp_path):
    (found,) = said(text, tmp_path)
    assert found.startswith(line)


@pytest.mark.parametrize("other", ["machine", "other"])
def test_machine_is_not_like_itself(other, tmp_path):
    written(tmp_path / "other.toml", f'like = "{tmp_path}/machine.toml"\nname = "other"')
    (found,) = said(f'like = "{tmp_path}/{other}.toml"\nname = "mine"', tmp_path)
    assert found == "`like` leads back to this file; remove `like` from one file"


def test_example_in_the_documentation_is_valid(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "prediction.md").read_text(encoding="utf-8")
    example = page[page.index('    like = "h100"') : page.index("\n\nTables such as")]
    found = load(written(tmp_path / "mine.toml", dedent(example)))
    assert (found.name, found.links[1].bandwidth) == ("my-cluster", 23e9)
    assert found.gemm["bfloat16"] == replace(load("h100").gemm["bfloat16"], sustained=650e12)


POSITIVE, RATE, TIME = st.floats(1e-12, 1e18), st.floats(1, 1e18), st.floats(0, 10)
KNOTS = st.lists(POSITIVE, min_size=2, max_size=5, unique=True).map(sorted).map(tuple)


@st.composite
def curves(draw):
    x = draw(KNOTS)
    y = draw(st.lists(POSITIVE, min_size=len(x), max_size=len(x)))
    return x, tuple(y)


@st.composite
def machines(draw):
    names = st.text(min_size=1).filter(str.strip).filter(str.isprintable)
    dtypes = draw(st.sets(st.sampled_from(sorted(TYPES)), min_size=1))
    inner = draw(st.lists(st.integers(2, 4), max_size=3))
    links, ranks = [], 1
    for factor in [*inner, 0]:
        ranks *= factor
        ratio = draw(st.floats(1, 64)) if links else 1.0
        links.append(Link(ranks, draw(TIME), *draw(st.tuples(*[RATE] * 3)), ratio))
    kinds = st.tuples(
        st.sampled_from(sorted(ALGORITHMS)),
        st.integers(2, 99),
        st.integers(1, 99),
        st.sampled_from(["alone", "at once"]),
    )
    masks = [st.booleans()] * 2
    return Machine(
        name=draw(names),
        source=draw(st.text()),
        ranks_per_node=draw(st.integers(1, 64)),
        cores=draw(st.sampled_from([0, 0.5, 1, 2.5, 64])),
        memory_gb=draw(POSITIVE),
        memory_bandwidth=draw(RATE),
        launch_s=draw(TIME),
        gemm={dtype: Rates(1e18, *draw(curves())) for dtype in sorted(dtypes)},
        links=tuple(links),
        kernels=draw(st.dictionaries(st.text(min_size=1), RATE, max_size=3)),
        measured=tuple(
            CallTable(*kind, *draw(curves())) for kind in draw(st.sets(kinds, max_size=3))
        ),
        attention=tuple(
            AttentionRates(draw(st.integers(1, 256)), *draw(st.tuples(*masks)), *draw(curves()))
            for _ in range(draw(st.integers(0, 2)))
        ),
        protocols=tuple(
            Protocol(draw(names), *draw(st.tuples(*[TIME] * 3)), draw(POSITIVE))
            for _ in range(draw(st.integers(0, 2)))
        ),
    )


@given(machine=machines())
def test_machine_round_trips_through_text(machine, tmp_path_factory):
    path = tmp_path_factory.mktemp("machine") / "machine.toml"
    path.write_text(dumps(machine), encoding="utf-8")
    assert load(path) == machine
