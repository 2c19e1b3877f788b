"""What was written at one cut is read at another, in any dtype, from any view; and the files are what they say."""

import json

import numpy as np
import pytest
import safetensors.torch
import torch

from megatron_lite.checkpoint import shard_file
from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.boxes import Piece, Request, flat_pieces, flat_requests
from megatron_lite.checkpoint.folder import TRACKER, find_latest, iteration_folder
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.manifest import describe, read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import single
from tests.checkpoint.checkpoint_model import full_state, local_tensors, play_save, rank_pieces, rank_targets, shards


def whole_piece(key, tensor):
    return Piece(key, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape), tensor)


def whole_request(key, tensor):
    return Request(key, tuple(tensor.shape), (0,) * tensor.ndim, tuple(tensor.shape), tensor)


def cut_at(size: int, parts: int) -> list[int]:
    return [size * i // parts for i in range(parts + 1)]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2)])
def test_any_cut_to_any_cut(tmp_path, saved, loaded):
    state = full_state()
    play_save(tmp_path, 100, [rank_pieces(state, saved, rank) for rank in range(saved)], {"consumed_samples": 6400})
    for rank in range(loaded):
        targets, requests = rank_targets(loaded, rank)
        assert load_checkpoint(tmp_path, requests, single()) == {"consumed_samples": 6400}
        for (_, _, found), (_, shard, wanted) in zip(targets, local_tensors(state, loaded, rank), strict=True):
            assert torch.equal(found, wanted), shard.name


@pytest.mark.parametrize(("saved", "loaded"), [((2, 3), (1, 2)), ((1, 5), (4, 1)), ((4, 1), (2, 3))])
def test_flat_slices_at_any_count(tmp_path, saved, loaded):
    """ZeRO: each local parameter flat, padded by nobody, cut into `dp` slices at any element."""
    state = full_state()
    (tp, dp), writers = saved, []
    for rank in range(tp):
        for d in range(dp):
            pieces = []
            for space, shard, local in local_tensors(state, tp, rank):
                a, b = cut_at(local.numel(), dp)[d : d + 2]
                pieces += flat_pieces(space, shard, local.shape, a, local.reshape(-1)[a:b])
            writers.append(pieces)
    play_save(tmp_path, 1, writers)
    tp, dp = loaded
    for rank in range(tp):
        for d in range(dp):
            requests, checks = [], []
            for space, shard, local in local_tensors(state, tp, rank):
                a, b = cut_at(local.numel(), dp)[d : d + 2]
                target = torch.zeros(b - a)
                requests += flat_requests(space, shard, local.shape, a, target)
                checks.append((target, local.reshape(-1)[a:b]))
            load_checkpoint(tmp_path, requests, single(), strict=False)  # one rank's slices alone miss some tensors
            assert all(torch.equal(found, wanted) for found, wanted in checks)


def test_one_process_save_and_load_and_what_lies_there(tmp_path):
    state = full_state()
    meta = {"args": {"lr": 1e-4, "name": "ä"}, "iteration": 7, "rng": "00ff", "none": None, "pair": (1, 2)}
    directory = tmp_path / "new" / "dir"
    folder = save_checkpoint(directory, 7, (whole_piece(*item) for item in state.items()), meta, single())
    assert folder == directory / "iter_0000007"
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "shard_00000.safetensors"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["iter_0000007", TRACKER]
    assert (folder.parent / TRACKER).read_text() == "7\n"
    library = safetensors.torch.load_file(folder / "shard_00000.safetensors")
    assert library.keys() == state.keys()
    assert all(torch.equal(library[key], state[key]) for key in state)
    manifest = read_manifest(folder)
    assert manifest.meta == {**meta, "pair": [1, 2]}
    assert "iteration 7: 1 files" in describe(manifest) and "optim/exp_avg_sq: 8 tensors" in describe(manifest)
    targets = {key: torch.zeros_like(value) for key, value in state.items()}
    load_checkpoint(folder.parent, [whole_request(*item) for item in targets.items()], single(), iteration=7)
    assert all(torch.equal(targets[key], state[key]) for key in state)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_are_converted(tmp_path, stored, wanted):
    value = torch.randn(5, 7).to(stored)
    save_checkpoint(tmp_path, 1, [whole_piece("model/x", value)], {}, single())
    target = torch.zeros(5, 7, dtype=wanted)
    load_checkpoint(tmp_path, [whole_request("model/x", target)], single())
    assert torch.equal(target, value.to(wanted))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_other_dtypes_scalars_and_empty_tensors(tmp_path, dtype):
    values = {"model/v": torch.tensor([0, 1, 1]).to(dtype), "model/s": torch.tensor(1).to(dtype),
              "model/e": torch.zeros(0, 3).to(dtype)}  # fmt: skip
    save_checkpoint(tmp_path, 1, [whole_piece(*item) for item in values.items()], {}, single())
    targets = {key: torch.zeros(value.shape).to(dtype) for key, value in values.items()}
    load_checkpoint(tmp_path, [whole_request(*item) for item in targets.items()], single())
    for key, value in values.items():
        assert torch.equal(targets[key].float(), value.float())
    double = torch.zeros((), dtype=torch.float64)
    load_checkpoint(tmp_path, [whole_request("model/s", double)], single(), strict=False)
    assert double == 1


def test_views_are_written_and_filled_and_parameters_need_no_care(tmp_path):
    base = torch.arange(60.0).view(6, 10)
    column = Piece("model/x", (10, 6), (0, 0), (10, 6), torch.nn.Parameter(base).t())
    save_checkpoint(tmp_path, 1, [column], {}, single())
    filled = torch.nn.Parameter(torch.zeros(8, 20))
    view = filled[1:4, ::2]  # [3, 10], strided: rows 2..4 of x transposed
    load_checkpoint(tmp_path, [Request("model/x", (10, 6), (0, 2), (10, 3), view.t())], single())
    assert torch.equal(filled.detach()[1:4, ::2], base[2:5])
    assert filled.detach().abs().sum() == base[2:5].sum()
    assert filled.grad is None and filled.is_leaf


@pytest.mark.parametrize("block", [8, 100, 1 << 20])
def test_small_blocks_of_three_dims(tmp_path, monkeypatch, block):
    """Whatever the block size, sub-blocks of a stack of experts are read right."""
    monkeypatch.setattr(shard_file, "BLOCK", block)
    full = torch.randn(4, 6, 5)
    pieces = [Piece("model/e", (4, 6, 5), (e, 0, f), (2, 6, n), full[e : e + 2, :, f : f + n]) for e in (0, 2)
              for f, n in ((0, 3), (3, 2))]  # fmt: skip
    play_save(tmp_path, 1, [pieces[:2], pieces[2:]])
    whole, inner = ((0, 0, 0), (4, 6, 5)), ((1, 2, 1), (2, 3, 3))
    corner, rows = ((3, 5, 4), (1, 1, 1)), ((0, 1, 0), (1, 5, 5))
    for offset, length in (whole, inner, corner, rows):
        for dtype in (torch.float32, torch.float64):
            target = torch.zeros(length, dtype=dtype)
            load_checkpoint(tmp_path, [Request("model/e", (4, 6, 5), offset, length, target)], single())
            wanted = full[tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))]
            assert torch.equal(target, wanted.to(dtype))


def test_only_what_is_needed_is_read_and_memory_stays_small(tmp_path, monkeypatch):
    full = torch.randn(1024, 64)
    save_checkpoint(tmp_path, 1, [whole_piece("model/a", full), whole_piece("model/b", full.clone())], {}, single())
    taken = []
    plain = shard_file.ShardReader.read_into
    monkeypatch.setattr(shard_file.ShardReader, "read_into", lambda s, t, p: (taken.append(len(t)), plain(s, t, p))[1])
    monkeypatch.setattr(shard_file, "BLOCK", 4096)
    request = Request("model/a", (1024, 64), (100, 0), (10, 32), torch.zeros(10, 32))
    load_checkpoint(tmp_path, [request], single(), verify=False, strict=False)
    assert torch.equal(request.tensor, full[100:110, :32])
    assert sum(taken) < 10 * 64 * 4 + 1000
    taken.clear()
    load_checkpoint(tmp_path, [request], single(), strict=False)
    assert max(taken) <= 4096 and sum(taken) < 1024 * 64 * 4 + 10 * 64 * 4 + 2000  # model/b is not hashed either


def test_same_iteration_again_and_the_tracker_follows(tmp_path):
    for value, iteration in ((1.0, 100), (2.0, 200), (3.0, 100)):
        save_checkpoint(tmp_path, iteration, [whole_piece("model/x", torch.full((4,), value))], {}, single())
        target = torch.zeros(4)
        assert find_latest(tmp_path) == iteration
        load_checkpoint(tmp_path, [whole_request("model/x", target)], single())
        assert target.tolist() == [value] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000100", "iter_0000200", TRACKER]


def test_ranks_without_pieces_write_no_file(tmp_path):
    play_save(tmp_path, 1, [[], [whole_piece("model/x", torch.ones(3))], []])
    assert list(read_manifest(iteration_folder(tmp_path, 1)).files) == ["shard_00001.safetensors"]


def test_meta_that_is_not_json_fails_the_save(tmp_path):
    with pytest.raises(CheckpointError, match="rank 0: TypeError.*Tensor"):
        save_checkpoint(tmp_path, 1, [whole_piece("model/x", torch.ones(3))], {"rng": torch.ones(2)}, single())
    assert list(tmp_path.iterdir()) == []
    meta = {"rng": np.ones(2).tolist(), 3: 0.1}
    save_checkpoint(tmp_path, 1, [whole_piece("model/x", torch.ones(3))], meta, single())
    assert read_manifest(tmp_path / "iter_0000001").meta == {"rng": [1.0, 1.0], "3": 0.1}


def test_manifest_is_lines_of_json(tmp_path):
    play_save(tmp_path, 3, [rank_pieces(full_state(), 2, rank) for rank in range(2)])
    text = (tmp_path / "iter_0000003" / "manifest.json").read_text()
    body = json.loads(text)
    assert body["format"] == "megatron_lite.checkpoint" and body["version"] == 2 and body["iteration"] == 3
    o_proj = body["tensors"]["model/attn.o_proj.weight"]
    assert o_proj["shape"] == [16, 16] and o_proj["dtype"] == "float32"
    assert [(b["file"], b["key"], b["offset"], b["length"]) for b in o_proj["boxes"]] == [
        ("shard_00000.safetensors", "model/attn.o_proj.weight[0:16,0:8]", [0, 0], [16, 8]),
        ("shard_00001.safetensors", "model/attn.o_proj.weight[0:16,8:16]", [0, 8], [16, 8]),
    ]
    assert sum(line.startswith('  "model/') for line in text.splitlines()) == 8
    assert len(shards(2, 0)) == 5
