"""Megatron-LM's rank files, built here by hand from a Hugging Face model: merged, they are that model again."""

import argparse
import enum

import numpy
import pytest
import torch
from hf_models import VOCAB, convert, save_model
from test_hugging_face import Bomb

from tools.convert_checkpoint import check

PADDED = 128


class Kind(enum.Enum):
    """Stands for an enum of Megatron's: its module is named so before saving."""

    flash = 1


Kind.__module__, Kind.__qualname__ = "megatron.core.transformer.enums", "AttnBackend"


def arguments(hf, tied, **more):
    """What Megatron's args would say of a Hugging Face configuration."""
    gpt = hf.model_type == "gpt2"
    heads, groups = hf.num_attention_heads, getattr(hf, "num_key_value_heads", hf.num_attention_heads)
    return argparse.Namespace(**dict(
        num_layers=hf.num_hidden_layers, hidden_size=hf.hidden_size, num_attention_heads=heads, kv_channels=8,
        ffn_hidden_size=4 * hf.hidden_size if gpt else hf.intermediate_size, seq_length=64, max_position_embeddings=64,
        group_query_attention=groups != heads, num_query_groups=groups if groups != heads else 1,
        position_embedding_type="learned_absolute" if gpt else "rope", rotary_base=10000, rotary_percent=1.0,
        normalization="LayerNorm" if gpt else "RMSNorm", norm_epsilon=1e-5 if gpt else hf.rms_norm_eps, swiglu=not gpt,
        add_bias_linear=gpt, add_qkv_bias=False, bias_gelu_fusion=gpt, untie_embeddings_and_output_weights=not tied,
        vocab_size=VOCAB, padded_vocab_size=PADDED, attention_backend=Kind.flash, params_dtype=torch.float32) | more)  # fmt: skip


def rows(tensor, t, tp):
    return tensor.chunk(tp, 0)[t].clone()


def columns(tensor, t, tp):
    return tensor.chunk(tp, 1)[t].clone()


def grouped(q, k, v, groups):
    """Rows of Q, K and V as Megatron stacks them: per KV head its queries, its key, its value."""
    parts = [part.chunk(groups, 0) for part in (q, k, v)]
    return torch.cat([part[g] for g in range(groups) for part in parts])


def padded(table):
    return torch.cat([table, torch.full((PADDED - VOCAB, table.shape[1]), 7.0)])


def llama_layer(state, i, t, tp, groups, te):
    layer = {name.removeprefix(f"model.layers.{i}."): v for name, v in state.items() if name.startswith(f"model.layers.{i}.")}
    qkv = grouped(*(layer[f"self_attn.{p}_proj.weight"] for p in "qkv"), groups)
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    norms = norms if te else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    gate_up = torch.cat([rows(layer[f"mlp.{p}_proj.weight"], t, tp) for p in ("gate", "up")])
    return {norms[0]: layer["input_layernorm.weight"], norms[1]: layer["post_attention_layernorm.weight"],
            "self_attention.linear_qkv.weight": rows(qkv, t, tp), "self_attention.linear_qkv._extra_state": torch.zeros(3),
            "self_attention.linear_proj.weight": columns(layer["self_attn.o_proj.weight"], t, tp),
            "mlp.linear_fc1.weight": gate_up,
            "mlp.linear_fc2.weight": columns(layer["mlp.down_proj.weight"], t, tp)}  # fmt: skip


def gpt_layer(state, i, t, tp):
    layer = {n.removeprefix(f"transformer.h.{i}."): v for n, v in state.items() if n.startswith(f"transformer.h.{i}.")}
    found = {"self_attention.linear_qkv.layer_norm_weight": layer["ln_1.weight"],
             "self_attention.linear_qkv.layer_norm_bias": layer["ln_1.bias"],
             "mlp.linear_fc1.layer_norm_weight": layer["ln_2.weight"], "mlp.linear_fc1.layer_norm_bias": layer["ln_2.bias"],
             "self_attention.linear_proj.weight": columns(layer["attn.c_proj.weight"].t(), t, tp),
             "self_attention.linear_proj.bias": layer["attn.c_proj.bias"],
             "mlp.linear_fc1.weight": rows(layer["mlp.c_fc.weight"].t(), t, tp),
             "mlp.linear_fc1.bias": rows(layer["mlp.c_fc.bias"], t, tp),
             "mlp.linear_fc2.weight": columns(layer["mlp.c_proj.weight"].t(), t, tp),
             "mlp.linear_fc2.bias": layer["mlp.c_proj.bias"]}  # fmt: skip
    found["self_attention.linear_qkv.weight"] = rows(grouped(*layer["attn.c_attn.weight"].t().chunk(3, 0), 4), t, tp)
    found["self_attention.linear_qkv.bias"] = rows(grouped(*layer["attn.c_attn.bias"].chunk(3, 0), 4), t, tp)
    return found


def save_megatron(model, folder, tp, pp, chunks=1, te=True, **more):
    """Write all ranks' files; stages hold equal numbers of layers."""
    state, hf, gpt = model.state_dict(), model.config, model.config.model_type == "gpt2"
    tied, per = bool(hf.tie_word_embeddings), hf.num_hidden_layers // (pp * chunks)
    prefix = ("transformer.wte.weight", "transformer.ln_f.") if gpt else ("model.embed_tokens.weight", "model.norm.")
    head = state[prefix[0]] if tied else state["lm_head.weight"]
    for t in range(tp):
        for p in range(pp):
            parts = []
            for c in range(chunks):
                part, first = {}, (c * pp + p) * per
                if first == 0:
                    part["embedding.word_embeddings.weight"] = rows(padded(state[prefix[0]]), t, tp)
                    if gpt:
                        part["embedding.position_embeddings.weight"] = state["transformer.wpe.weight"]
                for i in range(per):
                    layer = gpt_layer(state, first + i, t, tp) if gpt else llama_layer(
                        state, first + i, t, tp, hf.num_key_value_heads, te)  # fmt: skip
                    part |= {f"decoder.layers.{i}.{name}": value for name, value in layer.items()}
                if first + per == hf.num_hidden_layers:
                    part |= {f"decoder.final_layernorm.{n.removeprefix(prefix[1])}": v for n, v in state.items()
                             if n.startswith(prefix[1])}  # fmt: skip
                    if not tied or first:
                        part["output_layer.weight"] = rows(padded(head), t, tp)
                parts.append(part)
            named = {"model": parts[0]} if chunks == 1 else {f"model{c}": part for c, part in enumerate(parts)}
            place = folder / "iter_0000100" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
            place.mkdir(parents=True)
            args = arguments(hf, tied, **more)
            rng = [{"np_rng_state": numpy.random.RandomState(1).get_state()}]
            torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 100, "rng_state": rng, **named},
                       place / "model_optim_rng.pt")  # fmt: skip
    (folder / "latest_checkpointed_iteration.txt").write_text("100")


@pytest.fixture
def megatron_enum(monkeypatch):
    """pickle looks a class up where it says it is: a stand-in for Megatron's module while the files are written."""
    import sys
    import types

    for name in ("megatron", "megatron.core", "megatron.core.transformer", "megatron.core.transformer.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["megatron.core.transformer.enums"].AttnBackend = Kind


@pytest.mark.parametrize("kind, tp, pp, chunks, te", [
    ("gpt2", 1, 1, 1, True), ("gpt2", 2, 2, 1, True), ("llama1", 2, 2, 2, True), ("llama_gqa", 2, 1, 1, False),
    ("llama_tied", 1, 2, 1, True)])  # fmt: skip
def test_rank_files_are_merged(kind, tp, pp, chunks, te, tmp_path, megatron_enum, capfd):
    import hf_models

    hf_models.MODELS.setdefault("llama_gqa", lambda: hf_models.llama())
    model = save_model(kind, tmp_path / "hf")
    save_megatron(model, tmp_path / "megatron", tp, pp, chunks, te)
    assert convert("megatron-to-native", tmp_path / "megatron", tmp_path / "native") == 0, capfd.readouterr().err
    assert "agree" in check(tmp_path / "native", None, tmp_path / "hf")


def test_what_is_wrong_is_named(tmp_path, megatron_enum, capfd):
    model = save_model("llama1", tmp_path / "hf")
    save_megatron(model, tmp_path / "m", 2, 1)

    def fails_with(text, *flags):
        assert convert("megatron-to-native", tmp_path / "m", tmp_path / "native", *flags) == 1
        printed = capfd.readouterr().err
        assert text in printed and "Traceback" not in printed, printed

    file = tmp_path / "m" / "iter_0000100" / "mp_rank_01" / "model_optim_rng.pt"
    good = file.read_bytes()
    state = torch.load(file, weights_only=False)
    lost = {**state, "model": {k: v for k, v in state["model"].items() if "linear_fc2" not in k}}
    torch.save(lost, file)
    fails_with("missing tensor tp1.pp0.chunk0.layers.0.mlp.down_proj.weight")
    hit = tmp_path / "hit"
    torch.save({**state, "rng_state": Bomb(hit)}, file)
    fails_with("is refused, nothing in it was executed. Its pickle names")
    assert not hit.exists()
    file.write_bytes(good)
    fails_with("the files hold 4 layers, --num-layers is 5", "--", "--num-layers", "5")
    file.unlink()
    fails_with("does not exist")
    (tmp_path / "m" / "iter_0000100" / ".metadata").write_bytes(b"")
    fails_with("torch_dist format, whose index (.metadata) is a pickle")
