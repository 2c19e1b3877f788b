"""What the parity tests share: small models, a global batch with uneven loss masks, and a training run at any layout that
returns every gradient and parameter in canonical names, so that layouts can be compared tensor by tensor."""

import dataclasses

import pytest
import torch

from megatron_lite.comm import collectives as comm
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import Config, DataConfig, ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, TrainConfig
from megatron_lite.data.loader import Batch
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.step import train_step

SEQ, VOCAB, GLOBAL_BATCH = 32, 90, 8
LLAMA = ModelConfig(
    num_layers=4, hidden_size=32, ffn_hidden_size=48, num_attention_heads=8, group_query_attention=True, num_query_groups=2,
    kv_channels=8, seq_length=SEQ, max_position_embeddings=SEQ, position_embedding_type="rope", normalization="RMSNorm",
    swiglu=True, disable_bias_linear=True, add_qkv_bias=True, qk_layernorm=True, untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2, make_vocab_size_divisible_by=8)  # fmt: skip
GPT = ModelConfig(
    num_layers=4, hidden_size=32, ffn_hidden_size=64, num_attention_heads=8, kv_channels=4, seq_length=SEQ,
    max_position_embeddings=SEQ, hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.2,
    make_vocab_size_divisible_by=8, label_smoothing=0.1)  # fmt: skip
MODELS = {"llama_gqa": LLAMA, "gpt_tied": GPT}


def slow(*case):
    """A case that runs with --full alone."""
    return pytest.param(*case, marks=pytest.mark.full)


def cases(fast, every):
    """All cases of `every`, tuples; those not in `fast` run with --full alone."""
    every = list(every)
    assert all(case in every for case in fast)
    return [case if case in fast else slow(*case) for case in every]


def config_for(model, *, micro_batch=1, precision="fp64", optimizer="adam", train=None, **parallel):
    """A complete configuration; `parallel` are ParallelConfig fields with tp and pp for short."""
    short = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "sp": "sequence_parallel"}
    parallel = {short.get(name, name): value for name, value in parallel.items()}
    return Config(
        model=model,
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-2, clip_grad=0.5, weight_decay=0.1, lr_decay_style="constant", optimizer=optimizer,
                                  adam_eps=1e-6),
        precision=PrecisionConfig(**({precision: True} if precision != "fp32" else {})),
        data=DataConfig(vocab_size=VOCAB),
        train=train or TrainConfig(micro_batch_size=micro_batch, global_batch_size=GLOBAL_BATCH, train_iters=10, seed=7),
    )


def global_batch(step):
    """GLOBAL_BATCH samples of tokens, labels, and masks whose counts differ from sample to sample."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQ + 1), generator=generator)
    share = torch.rand(GLOBAL_BATCH, 1, generator=generator)
    mask = (torch.rand(GLOBAL_BATCH, SEQ, generator=generator) < share).float()
    return ids[:, :-1], ids[:, 1:], mask


def local_batches(config, mesh, step):
    """This rank's microbatches of the global batch, dealt out as the loader deals them."""
    tokens, labels, mask = global_batch(step)
    size, dp = config.train.micro_batch_size, mesh.dp.size
    batches = []
    for j in range(config.train.global_batch_size // (size * dp)):
        rows = slice((j * dp + mesh.dp.rank) * size, (j * dp + mesh.dp.rank + 1) * size)
        batches.append(Batch(tokens[rows], labels[rows], mask[rows]))
    return batches


def full(trainer, attribute):
    """[(parameter, tensor)] of all gradients ("grad") or parameters, gathered where ZeRO shards them: collective."""
    engine, found = trainer.engine, []
    for bucket in engine.buckets:
        flat = comm.all_gather(bucket.grad_shard if attribute == "grad" else bucket.param_shard, engine.shard)
        found += [(p, flat[slot.start : slot.start + slot.numel].view(p.shape)) for slot, p in bucket.slots()]
    return found


def pieces(trainer, attribute):
    """[(name, full shape, offset, length, tensor)] of what this rank owns of "grad" or "param"."""
    found = []
    for param, tensor in full(trainer, attribute):
        if not param.shard.tied:
            for box in param.shard.boxes:
                if box.owned:
                    found.append((box.name, box.full_shape, box.offset, box.length, box.of_local(tensor).detach().clone()))
    return found


def copies_agree(trainer):
    """Blocks that tp ranks share, tied copies, stages on two ranks: the same bits on every holder. [(name, offset, values)]"""
    return [(box.name, box.offset, box.of_local(tensor).flatten().double().tolist())
            for p, tensor in full(trainer, "param") for box in p.shard.boxes if box.copies > 1 or p.shard.tied
            or p.shard.name == "embed_tokens.weight" or trainer.mesh.mirror.size > 1]  # fmt: skip


def run_layout(rank, world, config, steps, shared_memory=True):
    """`steps` training steps of one rank; picklable, so it runs in the worker pool."""
    mesh = build_mesh(grid_of(config, world), torch.device("cpu"), shared_memory)
    return run_steps(build_trainer(config, mesh), range(steps))


def run_steps(trainer, steps, batches=local_batches):
    """What this rank has to show for some steps: losses, norms, gradients of the first and parameters after the last."""
    losses, norms, grads, peaks, held = [], [], [], [], []
    for step in steps:
        report = train_step(trainer, batches(trainer.config, trainer.mesh, step), step, step * GLOBAL_BATCH)
        losses.append(report.loss)
        norms.append(report.grad_norm)
        if not peaks:
            grads = pieces(trainer, "grad")
        peaks.append(report.result.peak_live)
        held.append(report.result.peak_held)
    params = pieces(trainer, "param")
    if trainer.mesh.dp_cp.rank:  # the other replicas hold the same
        grads = params = []
    return {"losses": losses, "norms": norms, "grads": grads, "params": params, "shared": copies_agree(trainer), "peak": peaks,
            "held": held}  # fmt: skip


def assemble(parts):
    """{name: full tensor} from all ranks' pieces; every element exactly once."""
    full, filled = {}, {}
    for name, shape, offset, length, tensor in parts:
        if name not in full:
            full[name], filled[name] = torch.zeros(shape, dtype=tensor.dtype), torch.zeros(shape, dtype=torch.int32)
        place = tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))
        full[name][place] = tensor
        filled[name][place] += 1
    for name, count in filled.items():
        assert (count == 1).all(), f"{name} is not owned exactly once"
    return full


def run_everywhere(pool, config, world, steps=5, shared_memory=True):
    """The run of all ranks merged: losses, norms, gradients of step 0, parameters at the end, by canonical name."""
    if world == 1:
        return merge([run_layout(0, 1, config, steps)])
    return merge(pool.run(run_layout, world, world, config, steps, shared_memory))


def merge(results):
    """One run out of its ranks' results, after making sure that they agree where they must."""
    for result in results[1:]:
        assert result["losses"] == results[0]["losses"] and result["norms"] == results[0]["norms"], "ranks disagree"
    shared = {}
    for result in results:
        for name, offset, values in result["shared"]:
            assert shared.setdefault((name, tuple(offset)), values) == values, f"copies of {name} drifted apart"
    return {
        "losses": results[0]["losses"],
        "norms": results[0]["norms"],
        "grads": assemble(p for r in results for p in r["grads"]),
        "params": assemble(p for r in results for p in r["params"]),
        "peak": [r["peak"][0] for r in results if r["peak"]],
        "held": [r["held"][0] for r in results if r["held"]],
    }


def relative(a, b, floor=0.1):
    """Largest difference relative to the largest value of the tensor (or to `floor`: Adam makes a step of 1e-9 of a key
    bias, whose gradient is zero but for rounding, since softmax does not see it)."""
    scale = max(b.double().abs().max().item(), floor)
    return (a.double() - b.double()).abs().max().item() / scale


def assert_equal_runs(run, reference, rtol, params=True, grad_rtol=None):
    """Losses, norms, every gradient and (after all steps) every parameter agree to `rtol`."""
    for kind in ("losses", "norms"):
        for mine, theirs in zip(run[kind], reference[kind], strict=True):
            assert abs(mine - theirs) <= rtol * abs(theirs), (kind, run[kind], reference[kind])
    assert run["grads"].keys() == reference["grads"].keys()
    largest = max(g.abs().max().item() for g in reference["grads"].values())
    for name, grad in reference["grads"].items():
        scale = max(grad.double().abs().max().item(), 1e-6 * largest)  # key biases have gradient zero
        difference = (run["grads"][name].double() - grad.double()).abs().max().item()
        assert difference <= (grad_rtol or rtol) * scale, f"gradient of {name}: {difference / scale:.2e}"
    if params:
        for name, param in reference["params"].items():
            assert relative(run["params"][name], param) <= rtol, f"parameter {name}"


def assert_same_bits(run, other):
    """Losses, norms, every gradient and every parameter are equal."""
    assert run["losses"] == other["losses"] and run["norms"] == other["norms"]
    for kind in ("grads", "params"):
        assert run[kind].keys() == other[kind].keys()
        for name, tensor in run[kind].items():
            assert torch.equal(tensor, other[kind][name]), f"{kind} of {name}"


def replace(config, group, **fields):
    return dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **fields)})
