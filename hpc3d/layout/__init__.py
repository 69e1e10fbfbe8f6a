"""Draw a layout: the layers and matrix blocks of each rank."""


def main(argv: list[str] | None = None) -> int:
    """Run `python -m hpc3d.layout`."""
    from hpc3d.layout.__main__ import main

    return main(argv)
