"""Saves behind the training: the copy is what is stored, all ranks finish or fail together, old ones go only afterwards."""

import resource
import threading
import time
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import background
from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.background import BackgroundSave, Snapshot
from megatron_lite.checkpoint.boxes import Piece
from megatron_lite.checkpoint.folder import TRACKER, complete_iterations, locked
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.grid import Grid
from tests.checkpoint.checkpoint_model import load_value, piece, save


def test_what_was_copied_is_stored_whatever_happens_meanwhile(tmp_path, monkeypatch):
    go, write = threading.Event(), background.write_own

    def slow(*arguments):
        go.wait(20)
        return write(*arguments)

    monkeypatch.setattr(background, "write_own", slow)
    save(tmp_path, 1, 1.0)
    own, snapshot = piece(2.0), Snapshot()
    under_way = BackgroundSave(tmp_path, 2, [own], {}, single(), snapshot)
    own.tensor.fill_(9.0)
    assert under_way.poll() is None and load_value(tmp_path) == 1.0
    with pytest.raises(CheckpointError, match="another run is saving"):
        save(tmp_path, 3, 3.0)  # the lock is held until the end
    go.set()
    assert under_way.poll(wait=True) == tmp_path / "iter_0000002"
    assert load_value(tmp_path) == 2.0
    save(tmp_path, 3, 3.0)
    memory = next(iter(snapshot.kept.values())).data_ptr()
    assert BackgroundSave(tmp_path, 4, [own], {}, single(), snapshot).poll(wait=True)
    assert load_value(tmp_path) == 9.0 and next(iter(snapshot.kept.values())).data_ptr() == memory


def test_a_copy_or_a_folder_that_fails_leaves_nothing(tmp_path):
    save(tmp_path, 1, 1.0)
    with pytest.raises(CheckpointError, match="rank 0: ZeroDivisionError"):
        BackgroundSave(tmp_path, 2, (1 / 0 for _ in "x"), {}, single(), Snapshot())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", TRACKER]
    with locked(tmp_path), pytest.raises(CheckpointError, match="another run is saving"):
        BackgroundSave(tmp_path, 2, [piece(2.0)], {}, single(), Snapshot())
    save(tmp_path, 2, 2.0)


def save_behind(rank, directory, fails):
    """(polls until it was over, error, number of threads left) on one of four ranks, which compute something meanwhile."""
    mesh, limits = build_mesh(Grid(tp=4), torch.device("cpu")), resource.getrlimit(resource.RLIMIT_FSIZE)
    rows, own = 20_000, torch.full((20_000, 8), float(rank))
    if rank == fails:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        pieces = [Piece("model/x", (4 * rows, 8), (rank * rows, 0), (rows, 8), own)]
        under_way = BackgroundSave(directory, 2, pieces, {}, mesh, Snapshot())
        for polls in range(10_000):
            assert float(comm.all_reduce(torch.ones(8), mesh.world)[0]) == 4.0
            if under_way.poll():
                return polls, "", None
            time.sleep(0.002 * (rank + 1))
    except CheckpointError as error:
        return 0, str(error), None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("fails", [None, 2])
def test_all_ranks_finish_or_fail_together(pool, tmp_path, fails):
    save(tmp_path, 1, 1.0)
    answers = pool.run(save_behind, 4, tmp_path, fails)
    assert len(set(answers)) == 1, answers
    names = sorted(path.name for path in tmp_path.iterdir())
    if fails is None:
        assert names == ["iter_0000001", "iter_0000002", TRACKER] and (tmp_path / TRACKER).read_text() == "2\n"
    else:
        assert "rank 2: OSError: [Errno 27] File too large" in answers[0][1]
        assert names == ["iter_0000001", TRACKER] and load_value(tmp_path) == 1.0


def keep(directory: Path, iteration: int, count: int):
    return save_checkpoint(directory, iteration, [piece(1.0)], {}, single(), keep=count)


def test_the_newest_are_kept_in_numeric_order(tmp_path):
    for iteration in (9, 10, 99, 100):
        save(tmp_path, iteration, 1.0)
    keep(tmp_path, 101, 3)
    assert complete_iterations(tmp_path) == [99, 100, 101]
    keep(tmp_path, 102, 1)
    assert complete_iterations(tmp_path) == [102]
    (tmp_path / "tensorboard").mkdir()
    save(tmp_path, 300, 1.0)  # of a run that this one branched off from
    keep(tmp_path, 103, 1)
    assert complete_iterations(tmp_path) == [103, 300] and (tmp_path / "tensorboard").is_dir()


def test_a_damaged_one_does_not_count_as_kept(tmp_path):
    for iteration in (1, 2, 3):
        save(tmp_path, iteration, 1.0)
    (tmp_path / "iter_0000003" / "shard_00000.safetensors").write_bytes(b"half")
    keep(tmp_path, 4, 2)
    assert complete_iterations(tmp_path) == [2, 4]


def test_old_ones_stay_while_the_new_one_is_not_safe(tmp_path, monkeypatch):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)
    with pytest.raises(CheckpointError):
        save_checkpoint(tmp_path, 3, (1 / 0 for _ in "x"), {}, single(), keep=1)
    assert complete_iterations(tmp_path) == [1, 2] and load_value(tmp_path) == 2.0
    monkeypatch.setattr("megatron_lite.checkpoint.folder.os.rename", refuse_old(tmp_path))
    with pytest.warns(UserWarning, match="cannot remove .*iter_0000001: Permission denied"):
        keep(tmp_path, 3, 2)
    assert (tmp_path / TRACKER).read_text() == "3\n"


def refuse_old(directory):
    import os

    rename = os.rename

    def renamed(source, target):
        if Path(source).parent == directory and Path(source).name.startswith("iter_"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    return renamed
