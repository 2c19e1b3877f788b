"""Loads read each block once: checksum and copy in one pass, and each block is verified by one rank, best one that reads it."""

import math
import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch
import xxhash

from megatron_lite.checkpoint import shard_file
from megatron_lite.checkpoint.background import Task
from megatron_lite.checkpoint.boxes import Piece
from megatron_lite.checkpoint.load import Loader, mostly_read, turns
from megatron_lite.checkpoint.manifest import Stored
from megatron_lite.checkpoint.shard_file import ShardReader, bytes_of, write_shard
from tests.checkpoint.checkpoint_model import full_state, play_save, rank_pieces, rank_targets

SHAPES = [(), (0, 3), (7,), (5, 3), (1, 40), (4, 3, 2)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of few bytes, so that each tensor takes several."""
    monkeypatch.setattr(shard_file, "BLOCK", 32)


def stored(tmp_path, tensor):
    """(an open file that holds the tensor, its block)"""
    shape = tuple(tensor.shape)
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.safetensors"
    written = write_shard(path, [Piece("x", shape, (0,) * len(shape), shape, tensor)])
    return ShardReader(path), written[0].box


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_one_pass_gives_the_checksum_and_any_parts(tmp_path, small_blocks, shape, kind):
    draws = random.Random(1)
    tensor = torch.randn(shape).to(kind)
    file, box = stored(tmp_path, tensor)
    dtype = str(kind).removeprefix("torch.")
    with file:
        assert box.checksum == xxhash.xxh3_64_intdigest(bytes_of(tensor)) == file.read_all(box, dtype, [])
        for target_kind in (kind, torch.float64):
            for _ in range(20):
                parts, wanted = [], []
                for _ in range(draws.choice([1, 1, 2, 3])):
                    ends = [sorted(draws.choices(range(n + 1), k=2)) for n in shape]
                    if draws.random() < 0.4:
                        ends = [[0, n] for n in shape]
                    length = tuple(b - a for a, b in ends)
                    target = torch.full((*length[:-1], 2 * length[-1]), 9.0, dtype=target_kind)[..., ::2] if shape else \
                        torch.full((), 9.0, dtype=target_kind)  # fmt: skip
                    target = target.contiguous() if draws.random() < 0.5 else target
                    parts.append(((tuple(a for a, _ in ends), length), target))
                    wanted.append(tensor[tuple(slice(a, b) for a, b in ends)])
                assert file.read_all(box, dtype, parts) == box.checksum
                for (part, target), own in zip(parts, wanted, strict=True):
                    assert torch.equal(target, own.to(target_kind))
                    again = torch.full_like(target, 9.0)
                    file.read_box(box, dtype, part, again)
                    assert torch.equal(again, own.to(target_kind))


def test_a_block_that_several_targets_share_needs_no_buffer(tmp_path, small_blocks, monkeypatch):
    """Rows of heads that lie apart in a fused parameter go straight there, and what nobody wants is summed."""
    tensor = torch.randn(9, 5)
    file, box = stored(tmp_path, tensor)
    targets = [torch.zeros(n, 5) for n in (2, 4, 3)]
    parts = [(((first, 0), (len(target), 5)), target) for first, target in zip((0, 2, 6), targets, strict=True)]
    with file:
        assert file.read_all(box, "float32", [*parts, parts[1]]) == box.checksum  # rows are wanted twice
        monkeypatch.setattr(shard_file, "copy_rows", None)
        for some in (parts[:1], parts[1:2], parts[2:], parts[:2], parts[::2]):
            assert file.read_all(box, "float32", some) == box.checksum
        for target in targets:
            target.zero_()
        assert file.read_all(box, "float32", parts[::-1]) == box.checksum
    assert torch.equal(torch.cat(targets), tensor)


@pytest.mark.parametrize("inside", [True, False], ids=["in place", "by way of a buffer"])
def test_a_flipped_bit_shows_in_the_same_pass(tmp_path, small_blocks, inside):
    tensor = torch.randn(9, 5)
    file, box = stored(tmp_path, tensor)
    whole = file.path.read_bytes()
    for position in range(len(whole) - tensor.nbytes, len(whole), 7):
        file.path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        target = torch.zeros(9, 5, dtype=torch.float32 if inside else torch.float64)
        assert file.read_all(box, "float32", [(((0, 0), (9, 5)), target)]) != box.checksum
    file.path.write_bytes(whole)
    assert file.read_all(box, "float32", [(((0, 0), (9, 5)), target)]) == box.checksum


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_each_block_has_one_turn_and_readers_come_first(ranks):
    draws, count = random.Random(ranks), 400
    reads = [[draws.random() < 0.3 for _ in range(count)] for _ in range(ranks)]
    packed = [mostly_read(*as_reads(own)) for own in reads]
    shares = torch.stack([torch.from_numpy(turns(packed, rank, count)) for rank in range(ranks)])  # [ranks, count]
    assert (shares.sum(0) == 1).all()
    readers = torch.tensor(reads)
    assert (readers | ~readers.any(0) | ~shares).all()  # who verifies reads, wherever anybody does
    assert shares.sum(1).max() <= 1.5 * count / ranks


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_replicas_share_alike_whatever_the_pattern_of_sizes(period):
    """Four ranks read everything; every `period`-th block is a hundred times as large."""
    count = 840
    sizes = torch.tensor([100 if i % period == 0 else 1 for i in range(count)])
    packed = [mostly_read(*as_reads([True] * count))] * 4
    loads = [int(sizes[torch.from_numpy(turns(packed, rank, count))].sum()) for rank in range(4)]
    assert max(loads) <= 1.15 * sum(loads) / 4


def as_reads(own):
    """Arguments of `mostly_read`: blocks of 8 elements, of which 4 are read where `own` says so, else 3."""
    blocks = [(Stored("file", str(i), (0,), (8,), 0), None) for i in range(len(own))]
    lengths = [4 if yes else 3 for yes in own]
    return blocks, [SimpleNamespace(box=box, shared=((0,), (n,))) for (box, _), n in zip(blocks, lengths, strict=True)]


@pytest.mark.parametrize(("saved", "loaded"), [(2, 2), (2, 4), (4, 1)])
def test_ranks_verify_every_wanted_block_once(tmp_path, saved, loaded):
    folder = play_save(tmp_path, 1, [rank_pieces(full_state(), saved, rank) for rank in range(saved)])
    loaders = [Loader(folder, [r for r in rank_targets(loaded, rank)[1] if r.key.startswith("model/")], True)
               for rank in range(loaded)]  # fmt: skip
    answers = [loader.prepare(check_sizes=False) for loader in loaders]
    wanted, extra = loaders[0].merge([answer.wanted for answer in answers], [answer.spaces for answer in answers])
    shares = [loader.share(wanted, [answer.reads for answer in answers], rank) for rank, loader in enumerate(loaders)]
    of_model = [n for n, (box, _) in enumerate(loaders[0].blocks) if box.key.startswith("model/")]
    assert sorted(sum(shares, [])) == of_model and extra == []
    if saved == loaded:  # each verifies what it reads; blocks of which both hold a copy are one rank's
        for loader, share in zip(loaders, shares, strict=True):
            own = {(read.box.file, read.box.key) for read in loader.reads}
            assert {(loader.blocks[n][0].file, loader.blocks[n][0].key) for n in share} <= own
    for loader, share in zip(loaders, shares, strict=True):
        loader.fill(share)
        for request in loader.requests:
            full = full_state()[request.key]
            place = tuple(slice(o, o + n) for o, n in zip(request.offset, request.length, strict=True))
            assert torch.equal(request.tensor, full[place]) and math.prod(request.length) == request.tensor.numel()


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no priorities here")
def test_what_is_written_behind_a_step_takes_idle_time_only():
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert Task(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).result() == 19
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
