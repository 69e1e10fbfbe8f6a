"""Runs of `bench scaling`."""

import json

from hpc3d import bench


def scaled(capsys, *words):
    """Run `bench scaling`; return its output and the dict from (kind, scheme, ranks) to rows."""
    assert bench.main(["scaling", *words, "--json"]) == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    return out, {(row["kind"], row["scheme"], row["ranks"]): row for row in rows}
