"""`--use-checkpoint-args`: what the checkpoint adds, what contradicts it; a tokenizer's fingerprint."""

import pytest

from megatron_lite.arguments import parse
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.comm.mesh import single
from megatron_lite.tokenizers.fingerprint import fingerprint

SIZES = ("--num-layers 3 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
         "--position-embedding-type rope --rotary-base 500000 --seq-length 64 --hidden-dropout 0").split()  # fmt: skip
RUN = "--micro-batch-size 2 --train-iters 3 --lr 1e-3 --mock-data".split()


@pytest.fixture
def trained(tmp_path):
    """A checkpoint without tensors, of a run with a NullTokenizer of 100 ids."""
    config, problems = parse([*SIZES, *RUN, "--tokenizer-type", "NullTokenizer", "--vocab-size", "100"], 1)
    assert not problems
    save_checkpoint(tmp_path, 1, [], {"config": config.as_dict()}, single())
    return config, [*RUN, "--load", str(tmp_path), "--use-checkpoint-args"]


def test_architecture_and_tokenizer_come_from_the_checkpoint(trained):
    stored, flags = trained
    config, problems = parse(flags, 1)
    assert not problems, problems
    assert config.data.vocab_size == stored.data.vocab_size == 101 and config.data.tokenizer_type == "NullTokenizer"
    ours, theirs = config.as_dict()["model"], stored.as_dict()["model"]
    assert {name: value for name, value in ours.items() if name != "hidden_dropout"} == {
        name: value for name, value in theirs.items() if name != "hidden_dropout"}  # fmt: skip
    assert ours["hidden_dropout"] == 0.1  # a run's own


def test_what_the_checkpoint_says_may_be_repeated_and_nothing_else(trained):
    _, flags = trained
    same = ["--num-layers", "3", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--seq-length", "128"]
    config, problems = parse([*flags, *same], 1)
    assert not problems, problems
    assert config.data.vocab_size == 101 and config.model.seq_length == 128
    _, problems = parse([*flags, "--num-layers", "4", "--rotary-base", "10000", "--vocab-size", "99"], 1)
    texts = [str(problem) for problem in problems]
    for wrong, was in (("--num-layers 4", "3"), ("--rotary-base 10000.0", "500000.0"), ("--vocab-size 99", "100")):
        assert any(wrong in text and text.count(f" {was}") for text in texts), (wrong, texts)
    _, problems = parse([*flags, "--model", "llama2-7b"], 1)
    assert any("--model llama2-7b" in str(p) and "--hidden-size 32" in str(p) for p in problems), problems


def test_no_checkpoint_is_said(tmp_path):
    _, problems = parse([*RUN, *SIZES, "--vocab-size", "9", "--load", str(tmp_path), "--use-checkpoint-args"], 1)
    assert len(problems) == 1 and "holds no checkpoint" in str(problems[0])


def test_fingerprint(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    first = fingerprint("HuggingFaceTokenizer", str(folder), 10)
    folder.rename(tmp_path / "two")
    (tmp_path / "two" / "README").write_text("other")
    assert fingerprint("HuggingFaceTokenizer", str(tmp_path / "two"), 10) == first
    (tmp_path / "two" / "tokenizer.json").write_text("{ }")
    assert fingerprint("HuggingFaceTokenizer", str(tmp_path / "two"), 10) != first
    assert fingerprint(None, None, 10) is None and fingerprint("NullTokenizer", None, 10).startswith("NullTokenizer 10 ")
