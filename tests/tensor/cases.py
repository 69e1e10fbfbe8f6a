"""Schemes on meshes, for tests of all of them."""

from dataclasses import replace

from hpc3d.tensor.split import SCHEMES, Split

CUBOIDS = [(2, 2, 2), (1, 2, 4), (2, 3, 2), (4, 2, 1)]
EXTRA = {
    "data": Split(m="x", replicate="x"),
    "fsdp": Split(m="x"),
    "2.5d-summa": Split(m="z x", n="y", replicate="z", panels="y"),
    "3d-turned": Split(m="y", n="z", k="x"),
    "own-1d": Split(n="x", own="x"),
}
SPLITS = {**SCHEMES, **EXTRA}


def sizes(name, cuboid):
    """Return the tensor axes of a mesh for a scheme: the axes of the cuboid that it uses."""
    if name in ("1d", "1d-sequence", "data", "fsdp", "own-1d"):
        return {"x": cuboid[0] * cuboid[1] * cuboid[2]}
    if name in ("2d", "2d-summa"):
        return {"x": cuboid[0] * cuboid[2], "y": cuboid[1]}
    return dict(zip("xyz", cuboid, strict=True))


def distinct():
    """Return (name, cuboid) of all schemes on all cuboids, each mesh once."""
    found = {}
    for name in SPLITS:
        for cuboid in CUBOIDS:
            found.setdefault((name, *sizes(name, cuboid).items()), (name, cuboid))
    return [*found.values()]


def splits(name, data=1):
    """Return the splits of a layer and of the next one, over d if `data` > 1."""
    split = SPLITS[name] if data == 1 else SPLITS[name].over("d")
    return [replace(split, defer=""), replace(split.next(), defer="")]
