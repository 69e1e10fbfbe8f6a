"""The memory of this machine, or of its container."""

from hpc3d.runtime import host_memory


def test_memory_is_that_of_the_group(monkeypatch, tmp_path):
    monkeypatch.setattr(host_memory, "LIMIT_OF_CONTAINER", tmp_path / "memory.max")
    whole = host_memory.total()
    assert whole > 1 << 28
    for text, found in (("1048576\n", 1 << 20), ("max\n", whole), ("9" * 18, whole)):
        (tmp_path / "memory.max").write_text(text)
        assert host_memory.total() == found
