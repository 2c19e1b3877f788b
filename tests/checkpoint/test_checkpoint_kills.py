"""A save that fails or is killed at any moment leaves a loadable checkpoint the latest; the next save cleans up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lite.checkpoint import folder as folders
from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.folder import TRACKER, complete_iterations, find_latest, locked
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import single
from tests.checkpoint.checkpoint_model import load_value, piece, save

REPOSITORY = Path(__file__).resolve().parents[2]


def test_leftovers_of_killed_runs_are_cleaned(tmp_path):
    save(tmp_path, 1, 1.0)
    (tmp_path / ".tmp-iter_0000002" / "deep").mkdir(parents=True)
    (tmp_path / ".tmp-iter_0000002" / "shard_00000.safetensors").write_bytes(b"half")
    (tmp_path / ".tmp-iter_0000003").mkdir()
    (tmp_path / f".tmp-{TRACKER}").write_text("9")
    assert load_value(tmp_path) == 1.0
    save(tmp_path, 2, 2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path):
    save(tmp_path, 1, 1.0)
    os.rename(tmp_path / "iter_0000001", tmp_path / ".old-iter_0000001")
    shutil.copytree(tmp_path / ".old-iter_0000001", tmp_path / ".tmp-iter_0000001")
    assert find_latest(tmp_path) == 1 and load_value(tmp_path) == 1.0
    save(tmp_path, 2, 2.0)  # puts it back
    assert complete_iterations(tmp_path) == [1, 2]
    os.rename(tmp_path / "iter_0000001", tmp_path / ".old-iter_0000001")
    save(tmp_path, 1, 3.0)  # the one being saved is put back first, then replaced
    assert load_value(tmp_path) == 3.0 and complete_iterations(tmp_path) == [1, 2]
    shutil.copytree(tmp_path / "iter_0000001", tmp_path / ".old-iter_0000001")
    save(tmp_path, 2, 4.0)  # the successor had come: the replaced one goes
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize("step", ["sync_folder", "write_durably"])
def test_failure_while_publishing_a_replacement(tmp_path, monkeypatch, step):
    save(tmp_path, 1, 1.0)
    save(tmp_path, 2, 2.0)

    def fail(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(folders, step, fail)
        with pytest.raises(CheckpointError, match="rank 0: OSError: .*Input/output error"):
            save(tmp_path, 2, 3.0)
    assert load_value(tmp_path) == 2.0
    assert not any(path.name.startswith(".tmp") for path in tmp_path.iterdir())


def test_a_failed_rename_puts_the_replaced_one_back(tmp_path, monkeypatch):
    save(tmp_path, 1, 1.0)
    rename = os.rename

    def fail_on_temporary(source, target):
        if ".tmp-" in str(source):
            raise OSError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(folders.os, "rename", fail_on_temporary)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save(tmp_path, 1, 2.0)
    assert (tmp_path / "iter_0000001").is_dir() and load_value(tmp_path) == 1.0


def test_pieces_that_fail_while_they_are_made(tmp_path):
    save(tmp_path, 1, 1.0)

    def pieces():
        yield piece(2.0)
        raise MemoryError("no memory for the copy")

    with pytest.raises(CheckpointError, match="rank 0: MemoryError: no memory"):
        save_checkpoint(tmp_path, 2, pieces(), {}, single())
    assert load_value(tmp_path) == 1.0


def test_two_runs_in_one_folder(tmp_path):
    save(tmp_path, 1, 1.0)
    with locked(tmp_path):
        (tmp_path / ".tmp-iter_0000002").mkdir()
        with pytest.raises(CheckpointError, match="another run is saving"):
            save(tmp_path, 3, 3.0)
        assert (tmp_path / ".tmp-iter_0000002").is_dir()  # theirs, not ours
    save(tmp_path, 3, 3.0)
    assert load_value(tmp_path) == 3.0


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        save(tmp_path / "file", 1, 1.0)


CHILD = """
import os, resource, signal, sys
sys.path.insert(0, sys.argv[2])
import torch
from megatron_lite.checkpoint.boxes import Piece
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import single

STEPS = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")

def save(directory, iteration, rows=4):
    pieces = [Piece("model/x", (rows, 8), (0, 0), (rows, 8), torch.full((rows, 8), 2.0))]
    save_checkpoint(directory, iteration, pieces, {}, single())

def killed_before(step):
    # kill -9 in place of the call number `step` that changes something on the disk
    count = 0
    def wrap(call):
        def counted(*args, **options):
            nonlocal count
            if count == step:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
            return call(*args, **options)
        return counted
    for name in STEPS:
        setattr(os, name, wrap(getattr(os, name)))

for name in sorted(os.listdir(sys.argv[1])):
    directory, (iteration, step) = os.path.join(sys.argv[1], name), map(int, name.split("-", 1))
    child = os.fork()
    if child == 0:
        if step < 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        else:
            killed_before(step)
        code = 1
        try:
            save(directory, iteration, 4 if step >= 0 else 40_000)
            code = 0
        except BaseException as error:
            print(error, file=sys.stderr)
        finally:
            os._exit(code)
    print(name, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_full_disk_and_kill_at_every_step(tmp_path):
    """A file size limit as a full disk (step -1), and kill -9 in place of each change on the disk.

    For a new iteration and for a replaced one. Whatever the moment: what is latest loads and is the old or the new one,
    and the next save works and cleans up.
    """
    for iteration in (1, 2):  # 1 replaces what is there
        for step in range(-1, 24) if iteration == 1 else range(-1, 18):
            save(tmp_path / f"{iteration}-{step}", 1, 1.0)
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(REPOSITORY)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    codes = {name: int(code) for name, code in map(str.split, child.stdout.splitlines())}
    loaded: dict[str, list[float]] = {"1": [], "2": []}
    for name in sorted(codes, key=lambda name: int(name.split("-", 1)[1])):
        value = load_value(tmp_path / name)
        if name.endswith("--1"):
            assert codes[name] == 1 and value == 1.0
            assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["iter_0000001", TRACKER]
            continue
        loaded[name[0]].append(value)
        assert codes[name] in (0, -9) and (codes[name] == -9 or value == 2.0)
        save(tmp_path / name, 3, 3.0)
        assert load_value(tmp_path / name) == 3.0
        assert not any(path.name.startswith(".") for path in (tmp_path / name).iterdir())
    for iteration, values in loaded.items():
        assert values == sorted(values) and values[0] == 1.0 and values[-1] == 2.0, iteration  # turns once, for good
        assert codes[f"{iteration}-{len(values) - 1}"] == 0, "the last step is past the end of a save"
    assert child.stderr.count("rank 0: OSError: [Errno 27] File too large: ") == 2
    assert child.stderr.count("saving iteration 2 to ") == 1
