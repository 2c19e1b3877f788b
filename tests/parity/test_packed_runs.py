"""Documents in one sample are as documents by themselves: loss, norm, every gradient and the update in fp64 at 1e-10, at
every layout, with recomputation, and in both forms of attention."""

import dataclasses
import itertools

import pytest
import torch
from layouts import (
    GLOBAL_BATCH,
    GPT,
    LLAMA,
    SEQ,
    assert_equal_runs,
    assert_same_bits,
    cases,
    config_for,
    global_batch,
    merge,
    replace,
    run_steps,
)

from megatron_lite.comm.mesh import build_mesh
from megatron_lite.config import ActivationConfig, TrainConfig
from megatron_lite.data.documents import Resets
from megatron_lite.data.loader import Batch
from megatron_lite.models import attention
from megatron_lite.models.packing import packing_of
from megatron_lite.training.evaluate import evaluate
from megatron_lite.training.setup import build_trainer, grid_of

CPU = torch.device("cpu")
MODELS = {"llama_gqa": LLAMA, "gpt_tied": GPT}
EOD, STEPS = 5, 1
ENDS = (  # of the documents in each row of the global batch
    (),  # one document, whose end is elsewhere
    (SEQ - 1,),  # one that ends with the window
    (0, 1, 2, 15),  # documents of one token
    (7, 20, SEQ - 1),
    (0,),
    (SEQ - 2,),  # the last one has one token
    tuple(range(SEQ)),  # nothing but ends
    (12, 13, 25),
)
LAYOUTS = {  # name -> (ranks, flags)
    "alone": (1, {}),
    "tp2": (2, {"tp": 2}),
    "tp2_sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "pp2_interleaved": (2, {"pp": 2, "num_virtual_stages_per_pipeline_rank": 2}),
    "pp2_zbv": (2, {"pp": 2, "pipeline_schedule": "zbv"}),
    "dp2_zero3": (2, {"zero_stage": 3}),
    "tp2_sp_pp2_zbv": (4, {"tp": 2, "sp": True, "pp": 2, "pipeline_schedule": "zbv"}),
    "cp2": (2, {"context_parallel_size": 2, "cp_comm_type": ("p2p", "a2a", "allgather", "p2p")}),
    "cp4": (4, {"context_parallel_size": 4, "cp_comm_type": ("p2p", "a2a", "allgather", "a2a+p2p"), "ulysses_degree": 2}),
    "cp2_tp2_sp_pp2": (8, {"context_parallel_size": 2, "cp_comm_type": ("a2a", "p2p", "allgather", "p2p"), "tp": 2, "sp": True,
                           "pp": 2}),
}
RECOMPUTED = {
    "kept": ActivationConfig(),
    "core_attn": ActivationConfig("selective"),
    "selective": ActivationConfig("selective", recompute_modules=("core_attn", "layernorm", "mlp_act")),
    "uniform_1": ActivationConfig("full", "uniform", 1),
}
FAST = [  # layout, model, what is computed again, rows of a microbatch
    ("alone", "llama_gqa", "kept", 2), ("alone", "gpt_tied", "selective", 1), ("tp2_sp", "llama_gqa", "core_attn", 2),
    ("tp2_sp", "gpt_tied", "kept", 2), ("pp2_zbv", "llama_gqa", "uniform_1", 1), ("pp2_interleaved", "gpt_tied", "kept", 2),
    ("dp2_zero3", "gpt_tied", "uniform_1", 2), ("cp4", "llama_gqa", "kept", 2), ("cp2", "gpt_tied", "core_attn", 1),
]  # fmt: skip


def ids_of(step):
    """The global batch of the other tests with documents in it: tokens, labels, mask."""
    tokens, labels, mask = global_batch(step)
    ids = torch.cat([tokens, labels[:, -1:]], 1)
    ids[ids == EOD] += 1
    for row, ends in enumerate(ENDS):
        ids[row, list(ends)] = EOD
    return ids[:, :-1], ids[:, 1:], mask


def bounds(row):
    """[(first token, last + 1)] of the documents in a row."""
    return [(a, b) for a, b in itertools.pairwise([0, *(end + 1 for end in ENDS[row]), SEQ]) if a < b]


DOCUMENTS = [(row, a, b) for row in range(GLOBAL_BATCH) for a, b in bounds(row)]


def separate(_config, _mesh, step):
    """Each document as a microbatch of its own."""
    tensors = ids_of(step)
    return [Batch(*(t[row : row + 1, a:b] for t in tensors)) for row, a, b in DOCUMENTS]


def together(config, mesh, step):
    """The rows as the loader gives them to this rank."""
    tensors, size, batches = ids_of(step), config.train.micro_batch_size, []
    for j in range(GLOBAL_BATCH // (size * mesh.dp.size)):
        first = (j * mesh.dp.size + mesh.dp.rank) * size
        tokens, labels, mask = (t[first : first + size] for t in tensors)
        batches.append(Batch(tokens, labels, mask, *Resets(EOD, True, True).of(tokens.numpy())))
    return batches


def by_document(q, k, v, p, generator, documents):
    """The form of CUDA."""
    return attention._sdpa_by_document(q, k, v, documents)


def run_packed(rank, world, config, form=None):
    """A step of one rank, with several blocks in a sample."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention.BLOCK_ROWS, torch.float64, 8)
        if form:
            patch.setattr(attention, "core_attention", form)
        trainer = build_trainer(config, build_mesh(grid_of(config, world), CPU))
        return run_steps(trainer, range(STEPS), together)


def everywhere(pool, config, world, form=None):
    return merge([run_packed(0, 1, config, form)] if world == 1 else pool.run(run_packed, world, world, config, form))


@pytest.fixture(scope="module")
def references():
    """Every document by itself, on one process."""
    found = {}
    for name, model in MODELS.items():
        train = TrainConfig(micro_batch_size=1, global_batch_size=len(DOCUMENTS), train_iters=10, seed=7)
        config = config_for(model, train=train)
        found[name] = merge([run_steps(build_trainer(config, build_mesh(grid_of(config, 1), CPU)), range(STEPS), separate)])
    return found


EVERY = itertools.product(LAYOUTS, MODELS, RECOMPUTED, (1, 2))


@pytest.mark.parametrize(("layout", "model", "form", "micro"), cases(FAST, EVERY))
def test_as_documents_by_themselves(pool, references, layout, model, form, micro):
    world, flags = LAYOUTS[layout]
    config = dataclasses.replace(config_for(MODELS[model], micro_batch=micro, **flags), activations=RECOMPUTED[form])
    assert_equal_runs(everywhere(pool, config, world), references[model], 1e-10)


@pytest.mark.parametrize("model", MODELS)
def test_the_form_of_cuda(references, model):
    run = everywhere(None, config_for(MODELS[model], micro_batch=4), 1, by_document)
    assert_equal_runs(run, references[model], 1e-10)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
def test_compiled(references, model):
    config = config_for(MODELS[model], micro_batch=4)
    assert_equal_runs(everywhere(None, replace(config, "train", compile=True), 1), references[model], 1e-10)


@pytest.mark.parametrize(("model", "form"), cases([("llama_gqa", "uniform_1")], itertools.product(MODELS, list(RECOMPUTED)[1:])))
def test_dropout_is_drawn_again_as_it_was(model, form):
    dropping = dataclasses.replace(MODELS[model], hidden_dropout=0.2, attention_dropout=0.2)
    config = config_for(dropping, micro_batch=4)
    run = everywhere(None, dataclasses.replace(config, activations=RECOMPUTED[form]), 1)
    assert_same_bits(run, everywhere(None, config, 1))


def test_validation_is_packed_as_training_is(references):
    """evaluate() scores what the loader gives: the loss of the first step, before its update."""
    config = config_for(LLAMA, micro_batch=4)
    trainer = build_trainer(config, build_mesh(grid_of(config, 1), CPU))

    class Loader:
        def next_step(self):
            return together(config, trainer.mesh, 0)

        def close(self):
            pass

    loss = evaluate(trainer, Loader(), 1, lambda: False)
    assert loss == pytest.approx(references["llama_gqa"]["losses"][0], rel=1e-10)


def test_each_flag_by_itself():
    """Learned positions can be moved in their table: then one flag alone is the other's reference."""
    config = config_for(dataclasses.replace(GPT, label_smoothing=0.0))
    chunk = build_trainer(config, build_mesh(grid_of(config, 1), CPU)).chunks[0]
    table = chunk.embedding.positions
    before = table.data.clone()
    row = 7
    tokens, labels, mask = (t[row : row + 1] for t in ids_of(0))
    positions, starts = Resets(EOD, True, True).of(tokens.numpy())

    @torch.no_grad()
    def loss(cut, places, packing):
        """Of the tokens `cut`, at the positions `places` of the table."""
        table.data[: len(places)] = before[places]
        value = chunk(tokens[:, cut], labels[:, cut], mask[:, cut], None, packing)
        table.data.copy_(before)
        return float(value)

    whole, in_order = slice(None), torch.arange(SEQ)
    moved = loss(whole, in_order, packing_of(positions, None, CPU))
    assert moved == pytest.approx(loss(whole, positions[0], packing_of(None, None, CPU)), rel=1e-12)
    confined = loss(whole, in_order, packing_of(None, starts, CPU))
    apart = sum(loss(slice(a, b), in_order[a:b], packing_of(None, None, CPU)) for a, b in bounds(row))
    assert confined == pytest.approx(apart, rel=1e-12)
    both = loss(whole, in_order, packing_of(positions, starts, CPU))
    assert len({round(x, 6) for x in (moved, confined, both, loss(whole, in_order, packing_of(None, None, CPU)))}) == 4
