"""Training with PyTorch's own parallelism has the same losses as hpc3d."""

import json
import os
import socket

import numpy as np
import pytest

from hpc3d import bench
from hpc3d.benchmarks.peers import _PEERS, Pair, PairedRuns
from hpc3d.comm.threads import meshes
from hpc3d.config.package_data import text_path
from hpc3d.data.token_file import open_tokens
from hpc3d.training.masking import batches_of
from hpc3d.training.trainer import Trainer

torch_peers = pytest.importorskip("hpc3d.benchmarks.torch_peers", exc_type=ImportError)

SIZES = {
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 4,
    "model.sequence": 8,
    "train.batch": 4,
    "train.dtype": "float64",
    "train.learning_rate": 3e-3,
    "train.clip": 0.5,
}
WORDS = [f"--{key}={value}" for key, value in SIZES.items()]


def losses_of_hpc3d(case, steps):
    (mesh,), _ = meshes({})
    with open_tokens(text_path(case.config.data.path)) as tokens:
        trainer = Trainer(mesh, case.config, 256, batches_of(case.config, tokens))
        return [trainer.step(number).loss for number in range(steps)]


def losses_of_torch(monkeypatch, folder, peer="eager"):
    variables = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    torch_peers.main(peer, folder)
    return json.loads((folder / "result.json").read_text())["losses"]


def test_eager_torch_has_the_losses_of_hpc3d(monkeypatch, tmp_path):
    case = PairedRuns(Pair("eager", 1, 1), WORDS, tmp_path)
    case._write_start()
    theirs = losses_of_torch(monkeypatch, case.folder)
    ours = losses_of_hpc3d(case, len(theirs))
    np.testing.assert_allclose(
        theirs, ours, rtol=1e-8
    )  # torch adds 1e-6 to the norm that it clips
    assert ours[-1] < ours[0]
    job = json.loads((case.folder / "job.json").read_text())
    for key in ("weight_decay", "clip", "epsilon", "beta2"):
        (case.folder / "job.json").write_text(json.dumps(job | {key: 0.9}))
        planted = losses_of_torch(monkeypatch, case.folder)
        assert max(abs(np.divide(planted, ours) - 1)) > 1e-7, key


def test_received_bytes_are_those_of_open_tcp_connections():
    descriptors = len(os.listdir("/proc/self/fd"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = torch_peers._received()
        client = socket.create_connection(server.getsockname())
        with client, server.accept()[0] as accepted:
            client.sendall(b"1234567")
            assert accepted.recv(7, socket.MSG_WAITALL) == b"1234567"
            assert torch_peers._received() == before + 7
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_every_peer_has_a_program():
    assert [*torch_peers.PEERS] == [*_PEERS]


@pytest.mark.slow
def test_compiled_torch_has_the_losses_of_hpc3d(monkeypatch, tmp_path):
    case = PairedRuns(Pair("compile", 1, 1), WORDS, tmp_path)
    case._write_start()
    theirs = losses_of_torch(monkeypatch, case.folder, "compile")
    np.testing.assert_allclose(theirs, losses_of_hpc3d(case, len(theirs)), rtol=1e-8)


@pytest.mark.slow
def test_parallel_peers_have_the_losses_of_hpc3d(capsys, tmp_path):
    words = ["--peers", ",".join(_PEERS[2:]), "--ranks", "2", "--rounds", "1", "--json"]
    assert bench.main(["peers", *words, "--out", str(tmp_path), *WORDS]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert max(row["difference"] for row in rows) < 1e-8
    assert all(row["ours_peak"] > 0 and row["theirs_peak"] > 0 for row in rows)
    received = {row["peer"]: (row["ours_received"], row["theirs_received"]) for row in rows}
    # On 2 ranks, DDP receives each gradient once. 1F1B receives activations or their gradients.
    parameters = 2 * (12 * 16 * 16 + 13 * 16) + 2 * 256 * 16 + 8 * 16 + 2 * 16
    assert received["ddp"] == pytest.approx([8 * parameters] * 2, rel=0.02)
    # gloo adds a header to each of the 4 microbatches.
    assert received["1f1b"] == pytest.approx([8 * 4 * 8 * 16] * 2, abs=4 * 300)
