"""What is wrong with pieces, files, manifests and trackers is named; nothing is unpickled; which checkpoint it is."""

import os
import pickle
import zlib

import pytest
import torch

from megatron_lite.checkpoint import shard_file
from megatron_lite.checkpoint.agree import CheckpointError, DamagedCheckpoint
from megatron_lite.checkpoint.boxes import Piece, Request
from megatron_lite.checkpoint.folder import TRACKER, complete_iterations, decide, find_latest
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.manifest import LAST, read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.shard_file import ShardReader
from megatron_lite.comm.mesh import single
from tests.checkpoint.checkpoint_model import full_state, load_value, local_tensors, play_save, rank_pieces, rank_targets, save


def load_all(directory, **options):
    load_checkpoint(directory, rank_targets(1, 0)[1], single(), **options)


@pytest.fixture
def sharded(tmp_path):
    """A checkpoint that two tp ranks wrote; its folder."""
    return play_save(tmp_path, 100, [rank_pieces(full_state(), 2, rank) for rank in range(2)])


# Saving what does not add up


def test_missing_overlapping_and_differing_pieces_are_named(tmp_path):
    x = torch.ones(4, 8)
    pieces = [
        Piece("model/gap", (4, 8), (0, 0), (2, 8), x[:2]),
        Piece("model/over", (4, 8), (0, 0), (3, 8), x[:3]),
        Piece("model/over", (4, 8), (2, 0), (2, 8), x[2:]),
        Piece("model/kind", (4, 8), (0, 0), (2, 8), x[:2]),
        Piece("model/kind", (4, 8), (2, 0), (2, 8), x[2:].half()),
        Piece("model/fine", (4, 8), (0, 0), (4, 8), x),
    ]
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 1, pieces, {}, single())
    text = str(caught.value)
    assert "model/gap: block [2:4,0:8] of its shape [4, 8] is missing" in text
    assert "model/over: blocks [0:3,0:8] and [2:4,0:8] overlap" in text
    assert "model/kind: its blocks belong to different tensors: float16[4, 8] and float32[4, 8]" in text
    assert "fine" not in text and "iteration 1" in text
    assert list(tmp_path.iterdir()) == []


def test_bad_pieces_are_named_before_anything_is_written(tmp_path):
    x = torch.ones(4, 8)
    pieces = [Piece("model/far", (4, 8), (2, 0), (4, 8), x), Piece("model/form", (4, 8), (0, 0), (2, 8), x),
              Piece("model/twice", (4, 8), (0, 0), (4, 8), x), Piece("model/twice", (4, 8), (0, 0), (4, 8), x),
              Piece("model/complex", (4, 8), (0, 0), (4, 8), x.to(torch.complex64))]  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, 1, pieces, {}, single())
    assert all(f"model/{name}" in str(caught.value) for name in ("far", "form", "twice", "complex"))
    assert list(tmp_path.iterdir()) == []


# Loading what is not right


def test_missing_extra_and_misshaped_tensors_come_in_one_error(sharded):
    _, requests = rank_targets(1, 0)
    kept = [r for r in requests if r.key != "model/norm.weight"]
    wrong = [Request("model/new.weight", (3,), (0,), (3,), torch.zeros(3)),
             Request("model/embed.weight", (11, 16), (0, 0), (11, 16), torch.zeros(11, 16)),
             Request("optim/exp_avg/embed.weight", (10, 16), (0, 0), (10, 16), torch.zeros(9, 16))]  # fmt: skip
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(sharded.parent, kept + wrong, single())
    text = str(caught.value)
    assert "model/new.weight: not in the checkpoint" in text
    assert "model/embed.weight: stored with shape [10, 16], wanted [11, 16]" in text
    assert "optim/exp_avg/embed.weight: block [0:10,0:16] comes with a tensor of shape [9, 16]" in text
    assert "model/norm.weight: stored, but no rank asks for it" in text
    assert len(caught.value.problems) == 4
    load_checkpoint(sharded.parent, kept, single(), strict=False)
    load_checkpoint(sharded.parent, [r for r in requests if r.key.startswith("model/")], single())


def test_long_lists_of_problems_are_cut(sharded):
    requests = [Request(f"model/new{i}", (3,), (0,), (3,), torch.zeros(3)) for i in range(50)]
    with pytest.raises(CheckpointError, match="and 30 more") as caught:
        load_checkpoint(sharded.parent, requests, single(), strict=False)
    assert len(caught.value.problems) == 50
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.problems == caught.value.problems


@pytest.mark.parametrize("verify", [True, False])
def test_a_deleted_or_truncated_shard_is_named(sharded, verify):
    shard = sharded / "shard_00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match="shard_00001.safetensors has .* bytes, .* truncated"):
        load_all(sharded.parent, verify=verify)
    shard.unlink()
    with pytest.raises(CheckpointError, match="shard_00001.safetensors: No such file"):
        load_all(sharded.parent, verify=verify)


def test_every_flipped_byte_is_noticed(sharded):
    for name in ("shard_00000.safetensors", "manifest.json"):
        whole = (sharded / name).read_bytes()
        for position in range(3, len(whole), len(whole) // 12):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << (position % 7)
            (sharded / name).write_bytes(damaged)
            with pytest.raises(CheckpointError, match=name):
                load_all(sharded.parent)
        (sharded / name).write_bytes(whole)
    load_all(sharded.parent)


@pytest.mark.parametrize(("whole", "flipped"), [
    (b'"data_offsets"', b'"data_offsetr"'), (b'"data_offsets": [0, ', b'"data_offsets": [0. '),
    (b'"data_offsets": [', b'"data_offsets":"['), (b'"shape"', b'"rhape"'), (b'"dtype"', b'"etype"'),
])  # fmt: skip
def test_a_header_with_a_flipped_byte_is_damage(sharded, whole, flipped):
    shard = sharded / "shard_00000.safetensors"
    shard.write_bytes(shard.read_bytes().replace(whole, flipped, 1))
    with pytest.raises(DamagedCheckpoint, match="shard_00000.safetensors"):  # an older checkpoint may serve
        load_all(sharded.parent)


def test_advice_that_is_not_taken_is_no_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(shard_file.os, "posix_fadvise", refuse, raising=False)
    play_save(tmp_path, 1, [rank_pieces(full_state(), 1, 0)])
    load_all(tmp_path)


def test_damage_names_the_tensor_and_can_be_ignored(sharded):
    shard = sharded / "shard_00001.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="shard_00001.safetensors is damaged: the checksum of optim/exp_avg_sq/"):
        load_all(sharded.parent)
    load_all(sharded.parent, verify=False)


def test_manifests_that_are_not_ours(sharded):
    manifest = sharded / "manifest.json"
    text = manifest.read_text()
    newer = text.replace('"version": 2', '"version": 3')
    for wrong, why in (("", "not JSON"), ("[]", "format"), ('{"format": "other"}', "format"),
                       (newer, "version 3; this program reads versions 1 and 2")):  # fmt: skip
        manifest.write_text(wrong)
        with pytest.raises(CheckpointError, match=why) as caught:
            read_manifest(sharded)
        assert str(manifest) in str(caught.value)
    for old, new, why in (("shard_00000.safetensors", "../outside.safetensors", "outside the folder"),
                          ('"dtype": "float32"', '"dtype": "float33"', "float33"),
                          ('"files": {', '"folders": {', "files")):  # fmt: skip
        manifest.write_text(text.replace(old, new))
        with pytest.raises(CheckpointError, match="checksum"):
            read_manifest(sharded)
        with pytest.raises(CheckpointError, match=why):
            read_manifest(sharded, verify=False)


def aged(folder):
    """Make a checkpoint one of format version 1, whose blocks have crc32."""
    path = folder / "manifest.json"
    text = path.read_text()
    for entry in read_manifest(folder).tensors.values():
        for box in entry.boxes:
            with ShardReader(folder / box.file) as file:
                start = file.position(box, entry.dtype)
                crc = zlib.crc32(file.path.read_bytes()[start : start + entry.bytes_of(box)])
            text = text.replace(f'"xxh3_64": {box.checksum}', f'"crc32": {crc}')
    text = text.rpartition(LAST)[0].replace('"version": 2', '"version": 1')
    path.write_text(f"{text}{LAST}{zlib.crc32(text.encode())}}}\n")


def test_checkpoints_with_crc32_are_loaded_and_verified(sharded):
    aged(sharded)
    assert "xxh3" not in (sharded / "manifest.json").read_text()
    targets, requests = rank_targets(1, 0)
    load_checkpoint(sharded.parent, requests, single())
    for (_, _, found), (_, shard, wanted) in zip(targets, local_tensors(full_state(), 1, 0), strict=True):
        assert torch.equal(found, wanted), shard.name
    shard = sharded / "shard_00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 1]))
    with pytest.raises(DamagedCheckpoint, match="shard_00001.safetensors is damaged: the checksum of"):
        load_all(sharded.parent)


def test_a_checksum_of_an_unknown_kind_is_named(sharded):
    path = sharded / "manifest.json"
    path.write_text(path.read_text().replace('"xxh3_64"', '"sha1"'))
    with pytest.raises(DamagedCheckpoint, match="KeyError 'checksum of "):
        read_manifest(sharded, verify=False)


class Trap:
    """Pickled, it makes a file when anybody unpickles it."""

    def __init__(self, marker: str):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def test_planted_pickles_never_run(sharded, tmp_path):
    """In any file that we write: none of them is one (C15, C16, C25)."""
    marker = tmp_path / "ran"
    trap = pickle.dumps(Trap(str(marker)))
    for name in ("shard_00000.safetensors", "manifest.json", f"../{TRACKER}"):
        path = sharded / name
        whole = path.read_bytes()
        path.write_bytes(trap + b"\0" * max(0, len(whole) - len(trap)))
        for verify in (True, False):
            with pytest.raises(CheckpointError):
                load_all(sharded.parent, verify=verify)
        path.write_bytes(whole)
    for name in (".metadata", "common.pt", "mp_rank_00/model_optim_rng.pt"):
        (sharded / name).parent.mkdir(exist_ok=True)
        (sharded / name).write_bytes(trap)
    load_all(sharded.parent)
    assert not marker.exists()
    pickle.loads(trap)
    assert marker.exists()  # the trap itself works


# Which checkpoint


@pytest.mark.parametrize("text", ["garbage", "", "-5", "1.5", "release", "١٢", "7" * 60])
def test_garbage_in_the_tracker(tmp_path, text):
    save(tmp_path, 1, 1.0)
    (tmp_path / TRACKER).write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=TRACKER):
        find_latest(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_value(tmp_path)
    assert load_value(tmp_path, iteration=1) == 1.0


def test_latest_that_is_not_there_is_an_error_and_emptiness_is_none(tmp_path):
    assert find_latest(tmp_path / "nowhere") is None
    assert find_latest(tmp_path) is None
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / ".tmp-iter_0000005").mkdir()
    assert find_latest(tmp_path) is None
    (tmp_path / TRACKER).write_text("12\n")
    with pytest.raises(CheckpointError, match="iter_0000012 does not exist"):
        find_latest(tmp_path)
    (tmp_path / "iter_0000012").mkdir()
    with pytest.raises(CheckpointError, match="iter_0000012 has no manifest"):
        find_latest(tmp_path)
    (tmp_path / TRACKER).unlink()
    with pytest.raises(CheckpointError, match="iter_0000012 has no manifest"):
        find_latest(tmp_path)
    with pytest.raises(CheckpointError, match="not a directory"):
        find_latest(__file__)
    for path in ("nowhere", "tensorboard"):
        with pytest.raises(CheckpointError, match=path):
            load_value(tmp_path / path)


def test_without_a_tracker_the_newest_complete_one_counts(tmp_path):
    for iteration in (9, 10, 100):
        save(tmp_path, iteration, float(iteration))
    (tmp_path / TRACKER).unlink()
    (tmp_path / "iter_0000100" / "manifest.json").unlink()
    assert complete_iterations(tmp_path) == [9, 10]
    assert load_value(tmp_path) == 10.0


def test_decide(tmp_path):
    full, empty = tmp_path / "full", tmp_path / "empty"
    save(full, 30, 1.0)
    save(full, 40, 1.0)
    empty.mkdir()
    assert decide(None, str(full), single())[:2] == (None, None)
    choice = decide(str(full), None, single())
    assert choice[:2] == (str(full), 40) and "iteration 40" in choice.says
    assert decide(str(full), str(empty), single(), iteration=30).iteration == 30
    for same in (str(empty), str(empty) + "/", str(tmp_path / "full" / ".." / "empty"), str(tmp_path / "new")):
        fresh = decide(same, str(tmp_path / "new") if "new" in same else str(empty), single())
        assert fresh[:2] == (None, None) and "FRESH" in fresh.says
    absent = tmp_path / "no"
    for load, other, iteration in ((empty, full, None), (empty, None, None), (absent, empty, None), (full, full, 31)):
        with pytest.raises(CheckpointError, match=str(load)):
            decide(str(load), other and str(other), single(), iteration)
    (full / TRACKER).write_text("garbage")
    with pytest.raises(CheckpointError, match="garbage"):
        decide(str(full), str(full), single())
