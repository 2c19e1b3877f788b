"""A small model as shard records only, cut for any tp, and saves by ranks that are played one after another."""

import torch

from megatron_lite.checkpoint.boxes import Piece, Request, box_pieces, box_requests
from megatron_lite.checkpoint.folder import TEMPORARY, clean, iteration_name, publish
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.save import merge, save_checkpoint, write_own
from megatron_lite.comm.mesh import single
from megatron_lite.parallel.shard import Box, Init, Shard, cut, split, whole

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 16, 4, 2, 4, 24, 10
INIT = Init("normal", 1.0)
SPACES = ("model", "optim/exp_avg", "optim/exp_avg_sq")


def rows(name: str, full_rows: int, start: int, count: int, local: int, copies: int = 1, copy: int = 0) -> Box:
    return Box(name, (full_rows, HIDDEN), (start, 0), (count, HIDDEN), (local, 0), copies, copy)


def qkv_shard(tp: int, rank: int) -> tuple[Shard, tuple[int, int]]:
    """Rows grouped per KV head: [kv][q.. k v][d]; with fewer KV heads than ranks, ranks share a head's k and v."""
    q_per_rank, sharing = HEADS // tp, max(1, tp // KV_HEADS)
    kv_here = max(1, KV_HEADS // tp)
    q_per_kv = q_per_rank // kv_here
    boxes, local = [], 0
    for i in range(kv_here):
        kv = rank // sharing * kv_here + i
        q = rank * q_per_rank + i * q_per_kv
        boxes.append(rows("attn.q_proj.weight", HEADS * HEAD_DIM, q * HEAD_DIM, q_per_kv * HEAD_DIM, local))
        local += q_per_kv * HEAD_DIM
        for name in ("attn.k_proj.weight", "attn.v_proj.weight"):
            boxes.append(rows(name, KV_HEADS * HEAD_DIM, kv * HEAD_DIM, HEAD_DIM, local, sharing, rank % sharing))
            local += HEAD_DIM
    return Shard("attn.qkv_proj.weight", tuple(boxes), INIT, True), (local, HIDDEN)


def shards(tp: int, rank: int) -> list[tuple[Shard, tuple[int, ...]]]:
    """(record, local shape) of every parameter of one tp rank: column, row, fused, replicated, padded."""
    start, ffn = split(FFN, tp, rank)
    fused = (rows("mlp.gate_proj.weight", FFN, start, ffn, 0), rows("mlp.up_proj.weight", FFN, start, ffn, ffn))
    padded = -(-VOCAB // tp) + 1  # the last rank's final rows are in no box
    first = min(VOCAB, rank * padded)
    embed = rows("embed.weight", VOCAB, first, min(padded, VOCAB - first), 0)
    o_proj = cut("attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM), 1, tp, rank)
    return [
        qkv_shard(tp, rank),
        (Shard("attn.o_proj.weight", (o_proj,), INIT, True), o_proj.length),
        (Shard("mlp.gate_up_proj.weight", fused, INIT, True), (2 * ffn, HIDDEN)),
        (Shard("norm.weight", (whole("norm.weight", (HIDDEN,), tp, rank),), INIT, False), (HIDDEN,)),
        (Shard("embed.weight", (embed,), INIT, True), (padded, HIDDEN)),
    ]


def full_shapes() -> dict[str, tuple[int, ...]]:
    return {box.name: box.full_shape for shard, _ in shards(1, 0) for box in shard.boxes}


def full_state(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Every full tensor of every namespace, by key."""
    generator = torch.Generator().manual_seed(seed)
    keys = [(f"{space}/{name}", shape) for space in SPACES for name, shape in full_shapes().items()]
    return {key: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for key, shape in keys}


def local_tensors(state, tp: int, rank: int):
    """[(namespace, record, local tensor)] of one rank; the padding is zero."""
    found = []
    for space in SPACES:
        for shard, shape in shards(tp, rank):
            local = torch.zeros(shape, dtype=next(iter(state.values())).dtype)
            for box in shard.boxes:
                box.of_local(local).copy_(box.of_full(state[f"{space}/{box.name}"]))
            found.append((space, shard, local))
    return found


def rank_pieces(state, tp: int, rank: int):
    return [own for space, shard, local in local_tensors(state, tp, rank) for own in box_pieces(space, shard, local)]


def rank_targets(tp: int, rank: int, dtype: torch.dtype = torch.float32):
    """[(namespace, record, zeros)], and the requests that fill them."""
    targets = [(space, shard, torch.zeros(shape, dtype=dtype)) for space in SPACES for shard, shape in shards(tp, rank)]
    return targets, [request for target in targets for request in box_requests(*target)]


def play_save(directory, iteration: int, pieces_by_rank, meta=None):
    """What save_checkpoint does on several ranks, played one after another."""
    directory.mkdir(parents=True, exist_ok=True)
    clean(directory)
    staging = directory / (TEMPORARY + iteration_name(iteration))
    reports = [write_own(staging, rank, pieces) for rank, pieces in enumerate(pieces_by_rank)]
    return publish(directory, staging, merge(iteration, reports, meta or {}))


def piece(value: float, rows: int = 4, key: str = "model/x") -> Piece:
    return Piece(key, (rows, 8), (0, 0), (rows, 8), torch.full((rows, 8), value))


def save(directory, iteration: int, value: float):
    return save_checkpoint(directory, iteration, [piece(value)], {}, single())


def load_value(directory, **options) -> float:
    target = torch.zeros(4, 8)
    load_checkpoint(directory, [Request("model/x", (4, 8), (0, 0), (4, 8), target)], single(), **options)
    assert (target == target[0, 0]).all()
    return float(target[0, 0])
