"""Sampling, generation against transformers, and tools/generate.py on a checkpoint that two tensor-parallel ranks wrote."""

import dataclasses
import functools

import pytest
import torch

from megatron_lite.checkpoint.boxes import box_pieces
from megatron_lite.checkpoint.folder import TEMPORARY, iteration_name, publish
from megatron_lite.checkpoint.save import merge, write_own
from megatron_lite.comm.mesh import Axis
from megatron_lite.config import Config, DataConfig, ModelConfig, ParallelConfig, PrecisionConfig, TrainConfig
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.training.generate import (
    GenerateError,
    Sampling,
    config_of,
    generate,
    load_model,
    next_logits,
    probabilities,
    sample,
)
from tools.generate import main

VOCAB, SEQ = 96, 32
LLAMA = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, group_query_attention=True, num_query_groups=2,
    kv_channels=8, seq_length=SEQ, max_position_embeddings=SEQ, position_embedding_type="rope", normalization="RMSNorm",
    norm_epsilon=1e-6, swiglu=True, disable_bias_linear=True, untie_embeddings_and_output_weights=True, hidden_dropout=0.0,
    attention_dropout=0.0, init_method_std=0.3)  # fmt: skip
GREEDY = Sampling(0.0)
CPU = torch.device("cpu")


def stages(model, vocab, *ranges, dtype=torch.float64, axis=None, padded=128):
    """Chunks of a model, in order."""
    tp = TensorParallel(axis or Axis("tp"), False, dtype, CPU)
    last = len(ranges) - 1
    ends = [(i == 0, i == last) for i in range(len(ranges))]
    return [TransformerStage(model, vocab, padded, own, *end, tp).initialise(3) for own, end in zip(ranges, ends, strict=True)]


def transformers_llama(ours):
    """transformers' model with the weights of ours, in fp64."""
    import transformers

    m = ours.model
    reference = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=m.hidden_size, intermediate_size=m.ffn_hidden_size, num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads, num_key_value_heads=m.num_kv_heads, head_dim=m.head_dim,
        max_position_embeddings=64, rms_norm_eps=m.norm_epsilon, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=None, pad_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": m.rotary_base}))  # fmt: skip
    for module in reference.modules():  # its RMSNorm casts to fp32 whatever it is given
        if type(module).__name__ == "LlamaRMSNorm":
            module.forward = functools.partial(torch.nn.functional.rms_norm, normalized_shape=(m.hidden_size,),
                                               weight=module.weight, eps=m.norm_epsilon)  # fmt: skip
    reference.double()
    tensors = {name.removeprefix("model."): p for name, p in reference.named_parameters()}
    boxes = [(param, box) for param in ours.parameters() for box in param.shard.boxes]
    for param, box in boxes:
        box.of_full(tensors[box.name].data).copy_(box.of_local(param.data))
    assert {box.name for _, box in boxes} == set(tensors)
    return reference


def test_greedy_equals_transformers():
    ours = stages(LLAMA, VOCAB, range(2))
    reference = transformers_llama(ours[0])
    prompt = [5, 17, 60, 3, 3, 91]
    torch.testing.assert_close(next_logits(ours, [prompt]), reference(torch.tensor([prompt])).logits[:, -1],
                               rtol=1e-9, atol=1e-9)  # fmt: skip
    expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=20)[0, len(prompt) :].tolist()
    assert list(generate(ours, prompt, 20, GREEDY)) == expected
    assert len(set(expected)) > 5  # not the same token over and over


def test_chunks_in_order_are_one_model():
    tokens = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(0))
    one = next_logits(stages(LLAMA, VOCAB, range(2)), tokens.tolist())
    two = next_logits(stages(LLAMA, VOCAB, range(1), range(1, 2)), tokens.tolist())
    assert one.shape == (3, VOCAB) and not one.requires_grad
    assert torch.equal(one, two)


def test_long_prefix_is_seen_through_the_last_tokens():
    chunks = stages(LLAMA, VOCAB, range(2))
    prompt = torch.randint(0, VOCAB, (SEQ + 9,), generator=torch.Generator().manual_seed(1)).tolist()
    assert list(generate(chunks, prompt, 3, GREEDY)) == list(generate(chunks, prompt[9:], 3, GREEDY))


def test_end_of_text_stops_and_is_not_given_out():
    chunks = stages(LLAMA, VOCAB, range(2))
    ids = list(generate(chunks, [1, 2, 3], 8, GREEDY))
    end = ids[4]
    assert list(generate(chunks, [1, 2, 3], 8, GREEDY, end=end)) == ids[: ids.index(end)]


@pytest.mark.parametrize("prompt", [[], [VOCAB], [-1]])
def test_bad_prompt(prompt):
    with pytest.raises(GenerateError, match="from 0 to 95"):
        list(generate(stages(LLAMA, VOCAB, range(2)), prompt, 1, GREEDY))


LOGITS = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 0.0]])


def test_sample_greedy_and_seeded():
    assert sample(LOGITS, 0.0).tolist() == [1, 2]
    assert sample(LOGITS, 1.0, top_k=1).tolist() == sample(LOGITS, 1.0, top_p=1e-9).tolist() == [1, 2]
    assert sample(LOGITS, 1e-30).tolist() == [1, 2]  # a tiny temperature overflows nothing
    draws = [sample(LOGITS.repeat(500, 1), generator=torch.Generator().manual_seed(7)) for _ in range(2)]
    assert torch.equal(*draws)
    share = (draws[0].view(-1, 2)[:, 0] == 1).double().mean()
    assert share == pytest.approx(torch.softmax(LOGITS[0], 0)[1].item(), abs=0.08)


def test_sample_refuses_broken_logits():
    with pytest.raises(GenerateError, match="not finite"):
        sample(torch.tensor([[1.0, float("nan")]]))


def test_cuts_by_hand():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    of = lambda *cut: probabilities(logits, *cut)[0].tolist()  # noqa: E731
    assert of(1.0, 2, 1.0) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert of(1.0, 0, 0.65) == pytest.approx([0, 4 / 7, 3 / 7, 0])  # 0.4 falls short, 0.4 + 0.3 reaches
    assert of(1.0, 0, 0.75) == pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])
    assert of(1.0, 3, 0.5) == pytest.approx([0, 4 / 7, 3 / 7, 0])  # 4/9 falls short
    assert of(0.5, 0, 1.0) == pytest.approx([1 / 30, 16 / 30, 9 / 30, 4 / 30])
    assert of(1.0, 99, 1.0) == pytest.approx([0.1, 0.4, 0.3, 0.2])
    assert probabilities(torch.zeros(1, 4), 1.0, 2, 1.0)[0].tolist() == [0.5, 0.5, 0, 0]  # equal ones: the lower ids


@pytest.mark.parametrize("temperature,top_k,top_p", [(0.7, 0, 0.9), (1.3, 5, 1.0), (1.0, 10, 0.5)])
def test_cuts_equal_transformers(temperature, top_k, top_p):
    from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
    scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
    torch.testing.assert_close(probabilities(logits, temperature, top_k, top_p), torch.softmax(scores, -1))


CONFIG = Config(model=LLAMA, parallel=ParallelConfig(tensor_model_parallel_size=2, sequence_parallel=True),
                precision=PrecisionConfig(), train=TrainConfig(world_size=2),
                data=DataConfig(tokenizer_type="ByteTokenizer", vocab_size=257, data_path=("corpus",)))  # fmt: skip


def write_checkpoint(directory, config, iteration=4, meta=None):
    """What two tensor-parallel ranks write, one after the other; their vocabulary is padded to 2 x 256 rows."""
    directory.mkdir(exist_ok=True)
    staging, reports = directory / (TEMPORARY + iteration_name(iteration)), []
    for rank in range(2):
        axis = Axis("tp", rank, (0, 1))
        (stage,) = stages(config.model, 257, range(2), dtype=torch.float32, axis=axis, padded=512)
        pieces = [piece for p in stage.parameters() for piece in box_pieces("model", p.shard, p.data)]
        pieces += [piece for p in stage.parameters() for piece in box_pieces("optim/exp_avg", p.shard, p.data)]
        reports.append(write_own(staging, rank, pieces))
    publish(directory, staging, merge(iteration, reports, {"config": config.as_dict()} if meta is None else meta))
    return directory


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG)


def test_a_checkpoint_of_two_ranks_loads_as_one_model(checkpoint):
    config, (model,), iteration = load_model(str(checkpoint))
    assert (config, iteration) == (CONFIG, 4)
    (whole,) = stages(LLAMA, 257, range(2), dtype=torch.float32, padded=384)
    for mine, fresh in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, fresh), mine.shard.name


def test_config_survives_other_versions():
    stored = CONFIG.as_dict()
    stored["model"]["from_the_future"] = 1
    stored["unknown"] = {}
    del stored["logging"], stored["train"]["seed"]
    assert config_of(stored) == CONFIG


def test_tool_writes_text_and_repeats_itself(checkpoint, capsys):
    flags = ["--load", str(checkpoint), "--prompt", "def ", "--max-new-tokens", "12", "--seed", "3"]
    texts = []
    for _ in range(2):
        assert main(flags) == 0
        out, err = capsys.readouterr()
        texts.append(out)
    assert texts[0] == texts[1] and texts[0].startswith("def ") and len(texts[0]) > 5
    assert "iteration 4" in err
    assert main(["--load", str(checkpoint), "--prompt", "", "--temperature", "0", "--max-new-tokens", "3"]) == 0


def test_tool_without_a_tokenizer_speaks_ids(tmp_path, capsys):
    data = DataConfig(mock_data=True, vocab_size=257)
    write_checkpoint(tmp_path / "mock", dataclasses.replace(CONFIG, data=data))
    assert main(["--load", str(tmp_path / "mock"), "--prompt", "1 2 3", "--max-new-tokens", "4", "--iteration", "4"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:3] == ["1", "2", "3"] and len(words) == 7
    with pytest.raises(SystemExit) as stop:  # nothing to start from
        main(["--load", str(tmp_path / "mock"), "--prompt", ""])
    assert stop.value.code == 1 and "at least one id" in capsys.readouterr().err


@pytest.mark.parametrize("flags,words", [
    (["--temperature", "-1"], "--temperature -1.0: expected 0 or more"),
    (["--top-p", "0"], "--top-p 0.0: expected more than 0"),
    (["--top-k", "-3", "--max-new-tokens", "0"], "--top-k -3"),
    (["--temp", "1"], "unrecognized arguments"),
])  # fmt: skip
def test_wrong_flags_exit_with_2(flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--load", "nowhere", "--prompt", "x", *flags])
    assert stop.value.code == 2 and words in capsys.readouterr().err


def test_unusable_checkpoints_are_one_line(tmp_path, capsys):
    write_checkpoint(tmp_path / "foreign", CONFIG, meta={})
    for folder, words in ((tmp_path / "nowhere", "does not exist"), (tmp_path / "foreign", "which model it holds")):
        with pytest.raises(SystemExit) as stop:
            main(["--load", str(folder), "--prompt", "x"])
        assert stop.value.code == 1 and words in capsys.readouterr().err
