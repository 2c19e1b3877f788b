"""The planner's arithmetic of experts and shared sequences, by hand and against the published sizes of models."""

from dataclasses import replace

import pytest

from megatron_lite.arguments import parse
from megatron_lite.planner.flops import flops_per_token
from megatron_lite.planner.memory import layer_activation_bytes, rank_state, state_bytes
from megatron_lite.planner.params import (
    count_active_parameters,
    count_parameters,
    expert_elements,
    expert_tensors,
    rank_parameters,
    unit_tensors,
)
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.traffic import axis_size, bytes_by_axis, context_transfers, dispatch_transfers

LLAMA = ("--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0 "
         "--attention-dropout 0 --untie-embeddings-and-output-weights --lr 1e-3 --mock-data --train-iters 2 "
         "--micro-batch-size 1 --seq-length 4096 ")  # fmt: skip
MIXTRAL = LLAMA + "--vocab-size 32000 --num-experts 8 --group-query-attention --num-query-groups 8 "
SIZES = {
    "mixtral-8x7b": (MIXTRAL + "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336",
                     46.7, 12.9),
    "mixtral-8x22b": (MIXTRAL + "--num-layers 56 --hidden-size 6144 --num-attention-heads 48 --ffn-hidden-size 16384",
                      140.6, 39.2),
    "deepseek-moe-16b": (LLAMA + "--vocab-size 102400 --num-layers 28 --hidden-size 2048 --num-attention-heads 16 "
                         "--ffn-hidden-size 10944 --num-experts 64 --moe-router-topk 6 --moe-layer-freq [0]+[1]*27 "
                         "--moe-ffn-hidden-size 1408 --moe-shared-expert-intermediate-size 2816", 16.4, 2.8),
}  # fmt: skip


def config_of(flags, world=1, **parallel):
    config, _ = parse(flags.split(), 1)
    config = replace(config, parallel=replace(config.parallel, **parallel))
    return replace(config, train=replace(config.train, world_size=world, global_batch_size=world))


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name):
    flags, total, active = SIZES[name]
    config = config_of(flags)
    assert round(count_parameters(config) / 1e9, 1) == total
    assert round(count_active_parameters(config) / 1e9, 1) == active


def test_flops_are_those_of_what_a_token_sees():
    config = config_of(SIZES["mixtral-8x7b"][0])
    norms, table = (2 * 32 + 1) * 4096, 32000 * 4096
    matrices = count_active_parameters(config) - norms - table  # the embedding is a look-up
    assert flops_per_token(config) == 6 * matrices + 6 * 32 * 4096 * 4096


@pytest.mark.parametrize(("tp", "ep", "etp"), [(1, 1, None), (1, 4, None), (2, 2, None), (2, 2, 1)])
def test_ranks_hold_their_share_of_experts(tp, ep, etp):
    config = config_of(SIZES["deepseek-moe-16b"][0], 8, tensor_model_parallel_size=tp, expert_model_parallel_size=ep,
                       expert_tensor_parallel_size=etp)  # fmt: skip
    pipeline = pipeline_of(config)
    (chunk,) = pipeline.chunks(0)
    experts = 27 * 64 // ep * 3 * 2048 * 1408 // (etp or tp)
    assert expert_elements(config, chunk.layers) == experts
    attention, shared, dense = 4 * 2048**2 // tp, 3 * 2048 * 2816 // tp, 3 * 2048 * 10944 // tp
    rest = 28 * (attention + 2 * 2048) + 27 * (64 * 2048 + shared) + dense + 2 * 102400 // tp * 2048 + 2048
    assert rank_parameters(config, 0, pipeline) == experts + rest
    assert sum(map(sum, expert_tensors(config, chunk))) == experts
    assert sum(map(sum, unit_tensors(config, chunk))) == rest


def sent(config, transfers):
    return sum(bytes_by_axis(config, transfers).values())


def test_bytes_of_shared_sequences_by_hand():
    """Mixtral's attention, 4096 tokens on 4 ranks: 32 heads and 8 key/value heads of 128, fp32."""
    config, part, q, kv = config_of(SIZES["mixtral-8x7b"][0], 4, context_parallel_size=4), 1024, 32 * 128, 8 * 128
    forward, backward = context_transfers(config, "p2p")
    assert sent(config, forward) == 4 * 2 * 4096 * kv * 3 / 4
    assert sent(config, backward) == 4 * 2 * 4096 * kv * 3 / 4 + 4 * 2 * 4096 * kv
    forward, backward = context_transfers(config, "a2a")
    assert sent(config, forward) == sent(config, backward) == 4 * part * (2 * q + 2 * kv) * 3 / 4
    forward, backward = context_transfers(config, "allgather")
    assert sent(config, forward) == 4 * 2 * 4096 * kv * 3 / 4 == sent(config, backward) / 2
    assert context_transfers(config_of(SIZES["mixtral-8x7b"][0]), "p2p") == ([], [])


def test_bytes_of_the_dispatch_by_hand():
    config = config_of(SIZES["mixtral-8x7b"][0], 8, expert_model_parallel_size=8)
    assert 2 * sent(config, dispatch_transfers(config)) == 4 * 4096 * 2 * 4096 * 7 / 8 * 4  # 4 T topk h (ep-1)/ep, fp32


def test_experts_are_sharded_over_fewer_ranks():
    config = config_of(SIZES["mixtral-8x7b"][0] + " --zero-stage 1", 8, expert_model_parallel_size=4, context_parallel_size=2)
    assert (config.data_parallel_size, axis_size(config, "dp_cp"), axis_size(config, "expert_dp")) == (4, 8, 2)
    assert state_bytes(config) == (4, 4, 8 / 8)  # fp32: two moments
    assert state_bytes(config, experts=True) == (4, 4, 8 / 2)
    pipeline = pipeline_of(config)
    experts = 32 * 2 * 3 * 4096 * 14336
    rest = rank_parameters(config, 0, pipeline) - experts
    assert rank_state(config, pipeline, 0)[3] == rest + 4 * experts


def test_activations_are_cut_over_cp():
    flags = SIZES["mixtral-8x7b"][0].replace("--num-experts 8 ", "")
    alone = config_of(flags + " --distributed-backend nccl")
    for size in (2, 4):
        shared = config_of(flags + " --distributed-backend nccl", size, context_parallel_size=size)
        assert layer_activation_bytes(shared) == layer_activation_bytes(alone) // size
