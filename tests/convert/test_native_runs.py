"""A run of our own goes to Hugging Face and opens there; an imported model trains on with the flags that are printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import VOCAB, convert, save_model, save_tokenizer
from safetensors.torch import load_file

import pretrain_gpt
from megatron_lite.arguments import parse
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.planner.params import count_parameters
from megatron_lite.training.generate import load_model
from megatron_lite.training.setup import build_trainer, grid_of
from megatron_lite.training.state import Progress, save

ROOT = Path(__file__).resolve().parents[2]
SIZES = ("--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 32 "
         "--micro-batch-size 2 --train-iters 2 --lr 1e-2 --mock-data --init-method-std 0.2 "
         "--hidden-dropout 0 --attention-dropout 0")  # fmt: skip
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 48"
RUNS = {
    "gpt2": ("--openai-gelu", "GPT2LMHeadModel"),
    "llama": (f"{LLAMA} --group-query-attention --num-query-groups 2 --untie-embeddings-and-output-weights --use-rope-scaling "
              "--rope-original-max-position 16 --rotary-base 5000", "LlamaForCausalLM"),
    "qwen2": (f"{LLAMA} --add-qkv-bias --bf16", "Qwen2ForCausalLM"),
    "qwen3": (f"{LLAMA} --qk-layernorm --kv-channels 16", "Qwen3ForCausalLM"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RUNS)
def test_a_trained_model_opens_in_transformers(kind, tmp_path, capfd):
    flags, architecture = RUNS[kind]
    (tmp_path / "tokenizer").mkdir()
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path / 'tokenizer'}"
    assert pretrain_gpt.main(f"{SIZES} {flags} {tokenizer} --save {tmp_path / 'run'}".split()) == 0
    assert convert("native-to-hf", tmp_path / "run", tmp_path / "hf") == 0
    assert "check: logits of both sides agree" in capfd.readouterr().err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    # AutoTokenizer builds a Qwen2 byte-level BPE whatever tokenizer.json says; ours is a word list
    words = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "hf")
    assert type(model).__name__ == architecture and model.config.vocab_size == VOCAB and words.eos_token_id == 2
    assert (model.config.bos_token_id, model.config.eos_token_id) == (1, 2)
    assert model.get_input_embeddings().weight.shape[0] == VOCAB  # padded to 128 in training
    assert words.decode(words("w5 w6").input_ids) == "w5 w6"
    ours = load_model(str(tmp_path / "run"), dtype=torch.float32).chunks[0]
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        mine = ours.logits(ours.hidden(tokens, None)).transpose(0, 1)[..., :VOCAB]
        theirs = model.float()(tokens).logits
    assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def save_sharded(rank, argv, world):
    """A checkpoint of initial weights, written by ranks that share them."""
    config, problems = parse(argv, world)
    assert not problems, problems
    trainer = build_trainer(config, build_mesh(grid_of(config, world), torch.device("cpu")))
    save(trainer, Progress(1, 4))
    return count_parameters(config)


@pytest.mark.parametrize("flags", ["--zero-stage 3", "--zero-stage 3 --pipeline-model-parallel-size 2",
                                   "--zero-stage 1 --tensor-model-parallel-size 2"])  # fmt: skip
def test_a_sharded_run_is_exported_whole(flags, tmp_path, pool, capfd):
    """No empty tensor, no part of one, every parameter once (C18); and the check of logits at the end."""
    ranks = 2 * (1 + ("parallel-size 2" in flags))
    argv = f"{SIZES} {LLAMA} {flags} --vocab-size {VOCAB} --save {tmp_path / 'run'}".split()
    number = pool.run(save_sharded, ranks, argv, ranks)[0]
    assert convert("native-to-hf", tmp_path / "run", tmp_path / "hf") == 0
    assert "check: logits of both sides agree" in capfd.readouterr().err
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert sum(tensor.numel() for tensor in found.values()) == number and all(tensor.numel() for tensor in found.values())


def test_what_no_family_is_cannot_be_exported(tmp_path, capfd):
    assert pretrain_gpt.main(f"{SIZES} {LLAMA} --rotary-percent 0.5 --vocab-size 40 --save {tmp_path / 'run'}".split()) == 0
    assert convert("native-to-hf", tmp_path / "run", tmp_path / "hf") == 1
    assert "--rotary-percent 0.5: LLaMA means 1.0" in capfd.readouterr().err and not (tmp_path / "hf").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen2"])
def test_training_goes_on_with_the_printed_flags(kind, tmp_path, capfd):
    model = save_model(kind, tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    flags = re.search(r"pretrain_gpt.py (--load .*)", capfd.readouterr().err)[1].split()
    more = f"--micro-batch-size 1 --mock-data --train-iters 1 --lr 0 --log-interval 1 --jsonl {tmp_path / 'log'}".split()
    assert pretrain_gpt.main([*flags, *more, "--save", str(tmp_path / "out")]) == 0
    assert json.loads((tmp_path / "log").read_text().splitlines()[0])
    after = load_model(str(tmp_path / "out"), dtype=torch.float32).chunks[0]
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        mine = after.logits(after.hidden(tokens, None)).transpose(0, 1)[..., :VOCAB]
        theirs = model(tokens).logits
    assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()  # the learning rate was zero


MEASURE = """
import sys
sys.path[:0] = sys.argv[1:3]
from hf_models import convert
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
assert convert(*sys.argv[3:], "--no-check") == 0
print(before, peak())
"""


def test_memory_is_bounded_by_the_largest_tensor(tmp_path):
    """Weights of eight times the largest tensor, 32 MB: the peak grows by less than twice that, both ways."""
    config = transformers.GPT2Config(vocab_size=16384, n_positions=64, n_embd=512, n_layer=18, n_head=4)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(tmp_path / "hf")
    largest, total = 16384 * 512 * 4, sum(p.numel() * 4 for p in model.parameters())
    assert total > 7 * largest
    for command, source, target in (("hf-to-native", "hf", "native"), ("native-to-hf", "native", "back")):
        arguments = [str(ROOT), str(ROOT / "tests" / "convert"), command, str(tmp_path / source), str(tmp_path / target)]
        done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True)
        before, peak = map(int, done.stdout.split()[-2:])
        print(f"{command}: peak {peak / 1e6:.0f} MB, {(peak - before) / 1e6:.0f} MB more than the imports alone")
        assert peak - before <= 2 * largest + 20e6
