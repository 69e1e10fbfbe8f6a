"""Trace files have the documented objects, each with a description."""

import h5py

from hpc3d.trace import schema
from hpc3d.trace.annotations import write_calibration, write_prediction
from tests.trace.test_annotations import MEASURED, PREDICTED


def test_every_object_in_the_file_has_a_description(path):
    write_calibration(path, MEASURED)
    write_prediction(path, PREDICTED)
    found = []
    with h5py.File(path) as file:
        file.visititems(lambda _, node: found.append(node))
        for node in (file, *found):
            assert node.attrs["description"], node.name
        columns = [node for node in found if isinstance(node, h5py.Dataset)]
        for column in columns:
            assert column.attrs["units"], column.name
            if h5py.check_string_dtype(column.dtype) is None:
                assert column.chunks[0] == 65536 and column.compression == "gzip"
                assert column.shuffle and column.fletcher32
        phases = h5py.check_enum_dtype(file["events/phase"].dtype)
        assert {column.name for column in columns} == defined()
    assert phases["forward"] == 0 and phases["other"] == 6


def test_item_sizes_follow_their_type_names():
    sizes = schema.item_sizes({0: "none", 7: "bfloat16", 3: "int64", 9: "another"})
    assert sizes.nonzero()[0].tolist() == [3, 7] and sizes[[3, 7]].tolist() == [8, 2]


def defined():
    """Return the paths of all defined columns, for the calibrations in MEASURED."""
    paths = set()
    for op, axis in MEASURED:
        for table, (_, columns) in schema.LAYOUT.items():
            table = table.replace("<op>", op).replace("<axis>", axis)
            paths |= {f"/{table}/{column.name}" for column in columns}
    return paths
