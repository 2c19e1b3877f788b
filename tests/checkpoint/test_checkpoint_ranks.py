"""Saving and loading by real processes: every layout, one rank's failure is everyone's, one decision for all."""

import os
import resource
import time
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.agree import CheckpointError, agree
from megatron_lite.checkpoint.boxes import Piece, flat_pieces, flat_requests
from megatron_lite.checkpoint.folder import TRACKER, decide
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.grid import Grid
from tests.checkpoint.checkpoint_model import full_state, local_tensors, rank_pieces, rank_targets


def mesh_of(tp: int = 1, dp: int = 1):
    return build_mesh(Grid(tp=tp, dp=dp), torch.device("cpu"))


def slice_of(local, mesh):
    """(start, this dp rank's flat slice) of a local parameter."""
    ends = [local.numel() * i // mesh.dp.size for i in range(mesh.dp.size + 1)]
    start, end = ends[mesh.dp.rank], ends[mesh.dp.rank + 1]
    return start, local.reshape(-1)[start:end]


def save_state(rank, directory, iteration, tp, dp):
    """Weights by dp rank 0, moments by every rank as flat slices."""
    mesh, state, pieces = mesh_of(tp, dp), full_state(iteration), []
    for space, shard, local in local_tensors(state, tp, mesh.tp.rank):
        if space != "model":
            pieces += flat_pieces(space, shard, local.shape, *slice_of(local, mesh))
    if mesh.dp.rank == 0:
        pieces += [piece for piece in rank_pieces(state, tp, mesh.tp.rank) if piece.key.startswith("model/")]
    save_checkpoint(directory, iteration, pieces, {"iteration": iteration, "rank": rank}, mesh)
    return (Path(directory) / TRACKER).read_text()


def load_state(rank, directory, iteration, tp, dp):
    """Loads and compares every element; what the ranks may disagree about is returned."""
    mesh, wanted, requests = mesh_of(tp, dp), [], []
    targets, full_requests = rank_targets(tp, mesh.tp.rank)
    requests += [request for request in full_requests if request.key.startswith("model/")]
    for (space, shard, target), (_, _, local) in zip(
        targets, local_tensors(full_state(iteration), tp, mesh.tp.rank), strict=True
    ):
        if space != "model":
            start, part = slice_of(target, mesh)
            requests += flat_requests(space, shard, target.shape, start, part)
            wanted.append((part, slice_of(local, mesh)[1]))
        else:
            wanted.append((target, local))
    choice = decide(str(directory), None, mesh)
    meta = load_checkpoint(choice.directory, requests, mesh, choice.iteration)
    assert all(torch.equal(found, local) for found, local in wanted)
    return choice.iteration, meta["rank"]


@pytest.mark.parametrize(("saved", "loaded"), [((2, 1), (1, 4)), ((1, 2), (2, 2)), ((2, 2), (1, 2)), ((2, 2), (4, 1))])
def test_save_and_load_at_other_layouts(pool, tmp_path, saved, loaded):
    assert set(pool.run(save_state, saved[0] * saved[1], tmp_path, 5, *saved)) == {"5\n"}
    assert len(read_manifest(tmp_path / "iter_0000005").files) == saved[0] * saved[1]
    assert set(pool.run(load_state, loaded[0] * loaded[1], tmp_path, 5, *loaded)) == {(5, 0)}


def piece_of(rank: int, rows: int, ranks: int) -> Piece:
    return Piece("model/x", (ranks * rows, 8), (rank * rows, 0), (rows, 8), torch.full((rows, 8), float(rank)))


def failing_save(rank, directory, how):
    """(error text, seconds) of a save that fails on rank 1 only."""
    mesh = mesh_of(tp=4)
    save_checkpoint(directory, 1, [piece_of(rank, 4, 4)], {}, mesh)
    rows, limits = 40_000 if how == "disk" else 4, resource.getrlimit(resource.RLIMIT_FSIZE)
    pieces = [piece_of(rank, rows, 4)]
    if how == "disk" and rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    if how == "missing" and rank == 1:
        pieces = []
    if how == "iterator" and rank == 1:
        pieces = (1 / 0 for _ in range(1))
    began = time.monotonic()
    try:
        save_checkpoint(directory, 2, pieces, {}, mesh)
    except CheckpointError as error:
        return str(error), time.monotonic() - began
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "", 0.0


@pytest.mark.parametrize(("how", "why"), [
    ("disk", "rank 1: OSError: [Errno 27] File too large"),
    ("missing", "rank 0: tensor model/x: block [4:8,0:8] of its shape [16, 8] is missing"),
    ("iterator", "rank 1: ZeroDivisionError"),
])  # fmt: skip
def test_one_ranks_failure_is_everyones(pool, tmp_path, how, why):
    answers = pool.run(failing_save, 4, tmp_path, how)
    assert len({text for text, _ in answers}) == 1
    assert why in answers[0][0] and "saving iteration 2" in answers[0][0]
    assert max(seconds for _, seconds in answers) < 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]
    assert (tmp_path / TRACKER).read_text() == "1\n"


def damaged_load(rank, directory):
    """Error text of a load in which each rank wants its own rows."""
    mesh = mesh_of(tp=4)
    save_checkpoint(directory, 1, [piece_of(rank, 4, 4)], {}, mesh)
    if rank == 0:
        path = Path(directory) / "iter_0000001" / "shard_00002.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    try:
        load_checkpoint(directory, [piece_of(rank, 4, 4)], mesh)
    except CheckpointError as error:
        return str(error)


def test_damage_is_found_by_one_rank_and_told_to_all(pool, tmp_path):
    texts = set(pool.run(damaged_load, 4, tmp_path))
    assert len(texts) == 1
    assert "shard_00002.safetensors is damaged: the checksum of model/x[8:12,0:8]" in texts.pop()


def several_failures(rank):
    mesh = mesh_of(tp=4)

    def work():
        if rank != 2:
            raise ValueError("odd" if rank % 2 else "even")

    values = agree(lambda: rank * 10, mesh.world, "counting")
    try:
        agree(work, mesh.world, "sharing")
    except CheckpointError as error:
        return values, str(error), repr(error.__cause__)


def test_agree_names_ranks_and_keeps_the_cause(pool):
    answers = pool.run(several_failures, 4)
    assert [values for values, _, _ in answers] == [[0, 10, 20, 30]] * 4
    text = "sharing failed\n  rank 0: ValueError: even\n  ranks 1, 3: ValueError: odd"
    assert {answer[1] for answer in answers} == {text}
    even, odd = "ValueError('even')", "ValueError('odd')"
    assert [answer[2] for answer in answers] == [even, odd, "None", odd]


def wrong_choice(rank, directory):
    try:
        return decide(directory, directory if rank == 0 else "/only/rank/0/decides", mesh_of(tp=2)).says
    except CheckpointError as error:
        return str(error)


def test_one_decision_for_all(pool, tmp_path):
    fresh = pool.run(wrong_choice, 2, str(tmp_path))
    assert fresh[0] == fresh[1] and "STARTING FRESH" in fresh[0]
    (tmp_path / TRACKER).write_text("garbage")
    wrong = pool.run(wrong_choice, 2, str(tmp_path))
    assert wrong[0] == wrong[1] and os.fspath(tmp_path / TRACKER) in wrong[0]
