"""Hugging Face folder -> checkpoint -> Hugging Face folder: the same bytes, the same logits at every layout, the same text."""

import json
import pickle
import shutil

import hf_models
import pytest
import safetensors.torch
import torch
import transformers
from hf_models import MODELS, VOCAB, convert, save_model, text_of

from megatron_lite.checkpoint.boxes import box_requests
from megatron_lite.checkpoint.load import load_checkpoint
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.comm.collectives import gather_objects
from megatron_lite.comm.mesh import build_mesh
from megatron_lite.convert import deepseek_moe, mixtral
from megatron_lite.convert.links import our_tensors
from megatron_lite.grid import Grid
from megatron_lite.models.transformer import TransformerStage
from megatron_lite.parallel.shard import allocate
from megatron_lite.parallel.tensor import TensorParallel
from megatron_lite.training.generate import config_of, generate, load_model


def logits_at(rank, directory, tokens, tp, pp):
    """This rank's share of the logits at a layout: stages one after the other, activations handed on as objects."""
    mesh = build_mesh(Grid(tp=tp, pp=pp), torch.device("cpu"))
    config = config_of(read_manifest(f"{directory}/iter_0000000").meta["config"])
    model, vocab = config.model, config.data.vocab_size
    per = model.num_layers // pp
    own = range(mesh.pp.rank * per, (mesh.pp.rank + 1) * per)
    parallel = TensorParallel(mesh.tp, False, torch.float32, torch.device("cpu"))
    padded = -(-vocab // (8 * tp)) * 8 * tp
    stage = TransformerStage(model, vocab, padded, own, mesh.pp.rank == 0, mesh.pp.rank == pp - 1, parallel)
    for param in stage.parameters():
        allocate(param)
    requests = [r for p in stage.parameters() for r in box_requests("model", p.shard, p.data.zero_())]
    load_checkpoint(directory, requests, mesh)
    x = torch.tensor(tokens)
    with torch.no_grad():
        for turn in range(pp):
            mine = stage.hidden(x, None) if mesh.pp.rank == turn else None
            x = next(v for v in gather_objects(mine, mesh.pp) if v is not None)
        part = stage.logits(x) if stage.last else None
    parts = [v for v in gather_objects(part, mesh.tp) if v is not None]
    return torch.cat(parts, -1).transpose(0, 1)[..., :vocab] if parts else None


@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_is_equal_in_every_byte_and_logits_are_those_of_transformers(kind, tmp_path, pool, capfd):
    """Rows of q and k (H01), theta (H02) and scaling (H03) of the rotation, a vocabulary padded here (H04), head_dim (H07),
    sliding window (H09), layers numbered over stages (H10), settings that training has no say in (H12)."""
    model = save_model(kind, tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    printed = capfd.readouterr().err
    assert "check: logits of both sides agree" in printed and "all of its tensors filled" in printed
    assert ("WARNING: attention sees 24 tokens back" in printed) == (kind == "mistral_window")
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back") == 0
    assert text_of(tmp_path / "back") == text_of(tmp_path / "hf")

    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)):
        args = (str(tmp_path / "native"), tokens.tolist(), tp, pp)
        results = [logits_at(0, *args)] if tp * pp == 1 else pool.run(logits_at, tp * pp, *args)
        mine = results[-1]
        difference = ((mine - expected).abs().max() / expected.abs().max()).item()
        assert difference <= 1e-5, (tp, pp, difference)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["gpt2", "llama_tied"])
def test_tied_models_on_three_stages(kind, tmp_path, pool, monkeypatch):
    """The head is the embedding of the first stage, with a stage in between (H05)."""
    monkeypatch.setitem(hf_models.SIZES, "num_hidden_layers", 6)
    monkeypatch.setitem(MODELS, "gpt2", lambda: hf_models.gpt2(n_layer=6))
    model = save_model(kind, tmp_path / "hf")
    assert "lm_head.weight" not in safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    tokens = torch.randint(0, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    mine = pool.run(logits_at, 3, str(tmp_path / "native"), tokens.tolist(), 1, 3)[-1]
    with torch.no_grad():
        expected = model(tokens).logits
    assert (mine - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen3"])
def test_greedy_text_is_transformers_own(kind, tmp_path):
    model = save_model(kind, tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native", "--no-check") == 0
    model.generation_config.eos_token_id = None
    prompt = [5, 17, 40]
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    chunks = load_model(str(tmp_path / "native"), dtype=torch.float32).chunks
    from megatron_lite.training.generate import Sampling

    assert list(generate(chunks, prompt, 20, Sampling(0.0))) == theirs[0, 3:].tolist()


def test_shards_bf16_and_their_index_come_back(tmp_path):
    save_model("llama3", tmp_path / "hf", torch.bfloat16, shard="30KB")
    assert (tmp_path / "hf" / "model.safetensors.index.json").is_file()
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back") == 0
    assert text_of(tmp_path / "back") == text_of(tmp_path / "hf")


def test_max_shard_size_and_dtype(tmp_path):
    model = save_model("gpt2", tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native", "--no-check") == 0
    flags = ("--max-shard-size", "40KB", "--dtype", "bfloat16")
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back", *flags) == 0
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {file.name for file in files}
    assert all(file.stat().st_size < 40_000 + 8_000 for file in files)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert back.dtype == torch.bfloat16
    for (name, mine), theirs in zip(back.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16)), name


def test_torch_files_are_read(tmp_path):
    model = save_model("llama_tied", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "hf" / "pytorch_model.bin")  # with the tied lm_head in it
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back") == 0
    found = safetensors.torch.load_file(tmp_path / "back" / "model.safetensors")
    state = model.state_dict()
    assert set(found) == set(state) - {"lm_head.weight"}
    assert all(torch.equal(found[name], state[name]) for name in found)


def test_old_names_and_buffers_of_gpt2(tmp_path):
    """Files of the bare model: no `transformer.` before the names, the causal masks among the tensors."""
    save_model("gpt2", tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    old = {name.removeprefix("transformer."): t for name, t in safetensors.torch.load_file(path).items()}
    old["h.0.attn.bias"] = torch.tril(torch.ones(1, 1, 64, 64, dtype=torch.uint8))
    safetensors.torch.save_file(old, path, metadata={"format": "pt"})
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back") == 0
    assert text_of(tmp_path / "back") == text_of(tmp_path / "hf")


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_planted_pickles_never_run(tmp_path, capfd):
    model = save_model("llama1", tmp_path / "hf")
    hit = tmp_path / "hit"
    (tmp_path / "hf" / "training_args.bin").write_bytes(pickle.dumps(Bomb(hit)))
    (tmp_path / "hf" / "modeling_llama.py").write_text(f"open({str(hit)!r}, 'w')")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "a") == 0
    assert convert("native-to-hf", tmp_path / "a", tmp_path / "b") == 0
    assert not hit.exists() and not (tmp_path / "b" / "modeling_llama.py").exists()
    (tmp_path / "hf" / "model.safetensors").unlink()
    for planted in ({"x": Bomb(hit)}, model.state_dict() | {"model.norm.weight": Bomb(hit)}):
        torch.save(planted, tmp_path / "hf" / "pytorch_model.bin")
        assert convert("hf-to-native", tmp_path / "hf", tmp_path / "c") == 1
        assert "is refused, nothing in it was executed" in capfd.readouterr().err and not hit.exists()
    (tmp_path / "hf" / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(hit)))
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "c") == 1
    assert not hit.exists() and not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
                                  "model.safetensors"])  # fmt: skip
def test_a_pickle_in_place_of_any_file_never_runs(name, tmp_path, capfd):
    save_model("llama1", tmp_path / "hf")
    hit = tmp_path / "hit"
    assert (tmp_path / "hf" / name).is_file()
    (tmp_path / "hf" / name).write_bytes(pickle.dumps(Bomb(hit)))
    code = convert("hf-to-native", tmp_path / "hf", tmp_path / "native")
    assert "Traceback" not in capfd.readouterr().err and not hit.exists()
    if name in ("config.json", "model.safetensors"):
        assert code == 1
    pickle.loads(pickle.dumps(Bomb(hit))).close()
    assert hit.exists()  # the trap itself works


def edit(folder, tensors=None, **settings):
    """Change tensors of a folder's only file (None: remove) and settings of its config.json."""
    path, config = folder / "model.safetensors", folder / "config.json"
    found = safetensors.torch.load_file(path) | (tensors or {})
    safetensors.torch.save_file({n: t for n, t in found.items() if t is not None}, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


FAULTS = {
    "missing tensor model.layers.1.mlp.up_proj.weight": dict(tensors={"model.layers.1.mlp.up_proj.weight": None}),
    "extra tensor model.layers.9.extra.weight [3]": dict(tensors={"model.layers.9.extra.weight": torch.ones(3)}),
    "wrong shape of tensor model.norm.weight: [5], expected [32]": dict(tensors={"model.norm.weight": torch.ones(5)}),
    "missing tensor model.layers.4.input_layernorm.weight": dict(num_hidden_layers=5),
    "extra tensor model.layers.3": dict(num_hidden_layers=3),
    "unknown architecture OPTForCausalLM; known: GPT2LMHeadModel, LlamaForCausalLM": dict(architectures=["OPTForCausalLM"]),
    "RoPE scaling 'yarn' is not built here; known: default, linear, llama3":
        dict(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}),
    "hidden_act 'gelu': only 'silu' can be represented": dict(hidden_act="gelu"),
    "attention_bias True with mlp_bias False": dict(attention_bias=True),
    "lm_head.weight is not model.embed_tokens.weight, though config.json ties them": dict(tie_word_embeddings=True),
}  # fmt: skip


@pytest.mark.parametrize("message", FAULTS)
def test_faults_are_named(message, tmp_path, capfd):
    save_model("llama1", tmp_path / "hf")
    edit(tmp_path / "hf", **FAULTS[message])
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 1
    printed = capfd.readouterr().err
    assert message in printed and "Traceback" not in printed
    assert not list(tmp_path.glob("native/iter_*"))


def test_broken_weights_fail_the_check(tmp_path, capfd):
    """Each layer has its own weights: two of them exchanged are found by the check, not by names or shapes (H13)."""
    save_model("llama1", tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 0
    capfd.readouterr()
    found = safetensors.torch.load_file(tmp_path / "hf" / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)]
    edit(tmp_path / "hf", {names[0]: found[names[1]], names[1]: found[names[0]]})
    from tools.convert_checkpoint import ConversionError, check

    with pytest.raises(ConversionError, match="the logits of both sides differ"):
        check(tmp_path / "native", None, tmp_path / "hf")


def test_nothing_is_overwritten(tmp_path, capfd):
    save_model("llama1", tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native", "--no-check") == 0
    before = text_of(tmp_path / "native" / "iter_0000000" / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native", "--no-check") == 1
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "hf", "--no-check") == 1
    assert "give a new folder" in capfd.readouterr().err
    assert text_of(tmp_path / "native" / "iter_0000000" / "hf") == before


def test_a_damaged_checkpoint_is_not_exported(tmp_path, capfd):
    save_model("llama1", tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native", "--no-check") == 0
    path = tmp_path / "native" / "iter_0000000" / "shard_00000.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back") == 1
    assert "is damaged: the checksum of" in capfd.readouterr().err
    assert not (tmp_path / "back").exists() and not list(tmp_path.glob(".tmp-*"))


def test_index_that_lies(tmp_path, capfd):
    save_model("llama1", tmp_path / "hf", shard="30KB")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    good = json.loads(path.read_text())
    for name, file, message in (("model.norm.weight", "../x.safetensors", "outside its folder"),
                                ("model.norm.weight", "gone.safetensors", "that are not there"),
                                ("nobody.weight", sorted(good["weight_map"].values())[0], "it is nowhere")):  # fmt: skip
        path.write_text(json.dumps(good | {"weight_map": good["weight_map"] | {name: file}}))
        assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native") == 1
        assert message in capfd.readouterr().err


def test_names_of_mixtral():
    names = {"layers.0.mlp.experts.3.gate_proj.weight": "model.layers.0.block_sparse_moe.experts.3.w1.weight",
             "layers.0.mlp.experts.3.up_proj.weight": "model.layers.0.block_sparse_moe.experts.3.w3.weight",
             "layers.0.mlp.experts.3.down_proj.weight": "model.layers.0.block_sparse_moe.experts.3.w2.weight",
             "layers.0.mlp.router.weight": "model.layers.0.block_sparse_moe.gate.weight",
             "lm_head.weight": "lm_head.weight", "norm.weight": "model.norm.weight"}  # fmt: skip
    assert {name: mixtral.their_name(name) for name in names} == names


def test_deepseek_moe_comes_and_goes(tmp_path, capfd):
    """Files of the published form, of which transformers has no class: every byte comes back, and our logits are those of
    tests/parity/test_transformers.py, which fills the same names."""
    sizes = hf_models.SIZES | dict(num_key_value_heads=4)
    config = sizes | dict(
        architectures=["DeepseekForCausalLM"], model_type="deepseek", hidden_act="silu", rope_theta=10000, n_routed_experts=4,
        num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, first_k_dense_replace=1, moe_layer_freq=1,
        norm_topk_prob=False, scoring_func="softmax", seq_aux=True, aux_loss_alpha=0.001, torch_dtype="float32")  # fmt: skip
    model, vocab = deepseek_moe.settings(config)
    assert deepseek_moe.to_json(model, vocab).items() >= {k: v for k, v in config.items() if "moe" in k or "expert" in k}.items()
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = {link.theirs: link.box.full_shape for link in deepseek_moe.links(our_tensors(model, vocab), {})}
    assert {"model.layers.1.mlp.gate.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.3.mlp.experts.3.up_proj.weight",
            "model.layers.2.mlp.shared_experts.down_proj.weight"} <= set(names)  # fmt: skip
    weights = {name: 0.1 * torch.randn(shape) for name, shape in names.items()}
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert convert("hf-to-native", folder, tmp_path / "native") == 0
    assert "check skipped: transformers has no model of type deepseek" in capfd.readouterr().err
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back") == 0
    assert text_of(tmp_path / "back") == text_of(folder)


def test_like_takes_settings_and_tokenizer_from_a_folder(tmp_path, capfd):
    save_model("qwen2", tmp_path / "hf")
    assert convert("hf-to-native", tmp_path / "hf", tmp_path / "native", "--no-check") == 0
    shutil.rmtree(tmp_path / "native" / "iter_0000000" / "hf")
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "back", "--like", str(tmp_path / "hf")) == 0
    assert text_of(tmp_path / "back") == text_of(tmp_path / "hf")
    edit(tmp_path / "hf", num_attention_heads=2)
    assert convert("native-to-hf", tmp_path / "native", tmp_path / "c", "--like", str(tmp_path / "hf")) == 1
    assert "--num-attention-heads: checkpoint 4, config.json 2" in capfd.readouterr().err
