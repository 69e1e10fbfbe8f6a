"""Any invalid trace file is rejected with one line."""

import errno
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest

import hpc3d.trace
from hpc3d.data.token_file import open_tokens, write_tokens
from hpc3d.data.tokenizer import ByteTokenizer
from hpc3d.trace.annotations import Calibration, write_calibration, write_prediction
from hpc3d.trace.file import changing
from hpc3d.trace.merge import merge
from tests.trace.small import write_all
from tests.trace.test_annotations import PREDICTED


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return merge(write_all(tmp_path_factory.mktemp("sound")))


@pytest.fixture
def path(sound, tmp_path):
    """File to be damaged."""
    return Path(shutil.copy(sound, tmp_path / "trace.h5"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_trace_is_written_on_a_file_system_without_locks(number, tmp_path, monkeypatch):
    """A run on such a file system writes its trace, and reads and changes token files."""

    class File(h5py.File):
        def __init__(self, *arguments, locking=None, **how):
            if locking is not False:
                raise OSError(number, "unable to lock file")
            super().__init__(*arguments, locking=locking, **how)

    monkeypatch.setattr(h5py, "File", File)
    path = merge(write_all(tmp_path))
    with changing(path) as file:
        file.attrs["changed"] = True
    with hpc3d.trace.open(path) as trace:
        assert len(trace.events["dur"])
    (tmp_path / "a.txt").write_text("a text")
    write_tokens(tmp_path / "a.h5", [tmp_path / "a.txt"], ByteTokenizer())
    assert len(open_tokens(tmp_path / "a.h5")) > 6


@contextmanager
def limit(size):
    """Limit files to `size` bytes: writing beyond it fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_merge_on_a_full_disk_names_the_trace_and_leaves_nothing(tmp_path):
    path = merge(write_all(tmp_path))
    size = path.stat().st_size
    path.unlink()
    for room in (0, size // 2, size - 1):
        with limit(room), pytest.raises(OSError, match="File too large") as failed:
            merge(tmp_path)
        assert failed.value.filename == str(path), room
        assert [each.name for each in tmp_path.iterdir()] == ["trace"]
    merge(tmp_path)


def test_prediction_on_a_full_disk_leaves_the_trace_as_it_was(tmp_path):
    path = merge(write_all(tmp_path))
    before = path.read_bytes()
    for room in (0, len(before) + 500):
        with limit(room), pytest.raises(OSError, match="File too large") as failed:
            write_prediction(path, PREDICTED)
        assert failed.value.filename == str(path), room
        assert path.read_bytes() == before and len([*tmp_path.iterdir()]) == 2


def newer(file, _):
    file.attrs["version"] = 2


def other_world(file, _):
    file.attrs["world_size"] = 5


def external_link(file, other):
    replace(file, h5py.ExternalLink(other, "/events/dur"))


def soft_link(file, _):
    replace(file, h5py.SoftLink("/events/t_start"))


def replace(file, link):
    del file["events/dur"]
    file["events/dur"] = link


def external_storage(file, other):
    del file["events/dur"]
    file.create_dataset("events/dur", (48,), "i8", external=[(other, 0, 48 * 8)])


def virtual(file, other):
    del file["events/dur"]
    layout = h5py.VirtualLayout((48,), "i8")
    layout[:] = h5py.VirtualSource(other, "events/dur", (48,))
    file.create_virtual_dataset("events/dur", layout)


def huge(file, _):
    for column in file["events"].values():
        column.resize((2**50,))


def uneven(file, _):
    file["events/dur"].resize((47,))


def two_dimensional(file, _):
    del file["events/dur"]
    file["events/dur"] = np.zeros((48, 1), "i8")


def other_type(file, _):
    del file["events/dur"]
    file["events/dur"] = np.zeros(48)


def linked_group(file, other):
    del file["events"]
    file["events"] = h5py.ExternalLink(other, "/events")


def absent_column(file, _):
    del file["events/dur"]


def absent_attribute(file, _):
    del file.attrs["missing"]
    file.attrs["world_size"] = "4"


def dataset_for_a_table(file, _):
    del file["events"]
    file["events"] = np.zeros(48)


def table_for_a_column(file, _):
    del file["events/dur"]
    file.create_group("events/dur")


def never_written(file, _):
    """Add a table that fits in the memory of most machines, but occupies no space in the file."""
    for column in file["events"].values():
        column.resize((10**8,))


def stored(**how):
    def replace_column(file, _):
        del file["events/dur"]
        file.create_dataset("events/dur", data=np.arange(48), maxshape=(None,), **how)

    return replace_column


def huge_chunk(file, _):
    """Add a chunk of half a GiB, of which a few bytes are stored."""
    del file["events/dur"]
    how = {"chunks": (2**26,), "compression": "gzip", "maxshape": (None,)}
    column = file.create_dataset("events/dur", (48,), "i8", **how)
    column.id.write_direct_chunk((0,), bytes(1 << 10))


def other_format(file, _):
    file.attrs["format"] = "something"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (newer, "version 2 .* 1; update hpc3d"),
        (other_format, "hpc3d trace;"),
        (absent_attribute, "attributes world_size, missing "),
        (external_link, "dur .*link"),
        (soft_link, "dur .*link"),
        (linked_group, "events .*link"),
        (external_storage, "dur .*stored"),
        (virtual, "dur .*stored"),
        (huge, r"t_start .*shape \(1125899906842624,\)"),
        (two_dimensional, r"dur .*\(48, 1\)"),
        (uneven, "/events .*lengths"),
        (other_type, "dur .*float64, .*i8"),
        (absent_column, "column dur .*missing"),
        (other_world, "/ranks .*rank"),
        (dataset_for_a_table, "events .*group"),
        (table_for_a_column, "dur .*stored"),
        (never_written, "shape .*memory"),
        (huge_chunk, "shape .*memory"),
        (
            stored(chunks=(48,), compression="lzf"),
            "dur .*filters .*gzip, shuffle, fletcher32",
        ),
        (stored(chunks=(48,), scaleoffset=0), "dur .*filters .*gzip, shuffle, fletcher32"),
    ],
)
def test_malformed_file_is_rejected(path, tmp_path, spoil, reason):
    other = tmp_path / "other.h5"
    other.write_bytes(path.read_bytes())
    with h5py.File(path, "r+") as file:
        spoil(file, other)
    with pytest.raises(ValueError, match=reason) as refusal, hpc3d.trace.open(path) as trace:
        trace.events["dur"]
    assert str(path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_damaged_value_is_rejected(path):
    with h5py.File(path) as file:
        chunk = file["events/dur"].id.get_chunk_info(0)
    content = bytearray(path.read_bytes())
    content[chunk.byte_offset + chunk.size // 2] ^= 1
    path.write_bytes(content)
    with hpc3d.trace.open(path) as trace:
        assert len(trace.events["t_start"]) == 48
        with pytest.raises(ValueError, match=r"trace\.h5: .*--merge"):
            trace.events["dur"]


def test_file_that_is_being_written_is_rejected(path):
    with h5py.File(path, "r+"):
        code = f"import hpc3d.trace; hpc3d.trace.open({str(path)!r})"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
    assert done.stderr.endswith(f"{path}: another process is writing this file; try again later\n")


def test_truncated_file_is_rejected(path):
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"trace\.h5: .*--merge"):
        hpc3d.trace.open(path)


@pytest.fixture
def whole(path):
    """File with a row in every table."""
    rows = {"bytes": [8], "t_min": [0.1], "t_median": [0.2], "t_p95": [0.3], "reps": [9]}
    write_calibration(path, {("send", "x"): Calibration(rows, 1e-6, 1e-9)})
    row = {"step": [-1], "quantity": ["step_s"], "stage": [-1], "rank": [-1], "value": [0.5]}
    write_prediction(path, row)
    return path


def everything(path):
    """Read all data of a trace, as lists of columns."""
    with hpc3d.trace.open(path) as trace:
        tables = [trace.events, trace.steps, trace.memory, trace.ranks, trace.prediction]
        tables += [trace.clock_model, trace.clock_samples, *trace.calibration.values()]
        columns = [column for table in tables for column in table.columns()]
        references = trace.strings, trace.groups, trace.rank_ptr.tolist()
        trace.events.frame(), trace.ranks.frame()
        return columns, references


def test_intact_file_is_read(whole):
    everything(whole)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("events/op", 77, "events/op .*: 77"),
        ("events/phase", 8, "events/phase .*: 8"),
        ("memory/kind", 8, "memory/kind .*: 8"),
        ("events/name", 10**9, "events/name .*: 1000000000"),
        ("events/group", 4, "events/group .*: 4"),
        ("events/group", -2, "events/group .*: -2"),
        ("events/parent", 48, "events/parent .*: 48"),
        ("events/peer", 4, "events/peer .*: 4"),
        ("events/rank", -1, "events/rank .*: -1"),
        ("steps/rank", 4, "steps/rank .*: 4"),
        ("ranks/host_id", 99, "ranks/host_id .*: 99"),
        ("prediction/rank", 4, "prediction/rank .*: 4"),
        ("groups/members", 4, "groups/members .*: 4"),
        ("groups/offset", 2**59, "/groups .*members"),
        ("groups/size", 2**31 - 1, "/groups .*members"),
        ("groups/size", -2, "/groups .*members"),
        ("index/rank_ptr", 13, "/index/rank_ptr .*/events"),
        ("events/flops", np.nan, "events/flops .*: nan"),
        ("clock/model/offset_ns", np.inf, "clock/model/offset_ns .*: inf"),
        ("clock/samples/offset_ns", np.nan, "offset_ns .*: nan"),
        ("calibration/send/x/t_min", np.nan, "t_min .*: nan"),
        ("prediction/value", np.nan, "prediction/value .*: nan"),
        ("strings/name", "x" * 5000, "/strings/name .*5000 "),
        ("strings/name", "node1", "/strings .*duplicate names"),
    ],
)
@pytest.mark.slow
def test_invalid_value_is_rejected(whole, column, value, reason):
    with h5py.File(whole, "r+") as file:
        file[column][0] = value
    with pytest.raises(ValueError, match=reason):
        everything(whole)


@pytest.mark.parametrize("pointers", [[0, 12, 11, 36, 48], [0, 12, 24, 36], [0, 12, 24, 36, 47]])
def test_rank_pointers_that_do_not_cover_the_rows_are_rejected(whole, pointers):
    with h5py.File(whole, "r+") as file:
        file["index/rank_ptr"].resize((len(pointers),))
        file["index/rank_ptr"][:] = pointers
    with pytest.raises(ValueError, match=r"rank_ptr .*/events"):
        everything(whole)


@pytest.mark.slow
def test_excessive_string_table_is_rejected(whole):
    """Rows of variable length refer to a heap, and all of them may refer to the same data."""
    with h5py.File(whole, "r+") as file:
        del file["strings/name"]
        text = h5py.string_dtype()
        file["strings/name"] = np.array(["y" * 4000] * 20000, object).astype(text)
    with pytest.raises(ValueError, match=r"/strings/name .*4000 .*, 67"):
        everything(whole)


@pytest.mark.parametrize("spoil", ["alpha", "link"])
def test_damaged_calibration_is_rejected(whole, spoil):
    with h5py.File(whole, "r+") as file:
        if spoil == "alpha":
            file["calibration/send/x"].attrs["alpha"] = np.nan
        else:
            file["calibration/recv"] = h5py.SoftLink("/calibration/send")
    with pytest.raises(ValueError, match="alpha and beta" if spoil == "alpha" else r"recv .*link"):
        everything(whole)


def test_large_attributes_are_skipped(whole):
    path = whole.with_name("latest.h5")
    with h5py.File(whole) as old, h5py.File(path, "w", libver="latest") as file:
        for name in old:
            old.copy(name, file)
        file.attrs.update(old.attrs)
        file.attrs["large"], file.attrs["texts"] = np.zeros(10**6), ["a", "b"]
    with hpc3d.trace.open(path) as trace:
        assert not {"large", "texts"} & trace.attrs.keys()
        assert trace.attrs["run_id"] == "run-1"


def test_rejected_file_is_closed(whole):
    """Otherwise, no code in this process could write the file."""
    with h5py.File(whole, "r+") as file:
        file.attrs["version"] = 2
    with pytest.raises(ValueError, match="version 2") as refusal:
        hpc3d.trace.open(whole)
    with h5py.File(whole, "w"):
        assert refusal


@pytest.mark.slow
def test_fuzzed_file_is_read_or_rejected(whole, chance):
    """A crash, a hang, or any other exception in the separate process would be an error."""
    what = str(whole), "100", str(chance.getrandbits(32))
    program = [sys.executable, "-m", "tests.trace.damaged", *what]
    done = subprocess.run(program, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr
    outcomes = done.stdout.split()[1::2]
    assert len(outcomes) == 100 and {*outcomes} == {"read", "refused"}
