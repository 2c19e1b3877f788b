"""Megatron-LM's checkpoints of --ckpt-format torch: one file per (tp, pp) rank, merged as they are read.

    <load>/latest_checkpointed_iteration.txt, iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt
    {"args": Namespace, "model" or "model0", "model1", ... (virtual stages): {name: tensor of this rank}}

The cut is ours as well (rows of QKV per KV head, gate above up), so the shard records of our own stage at that tp rank say
which block of which full tensor each of their tensors is. Layers count from 0 in each file; how many a file holds says which.

The files are pickles. They are read by torch's reader for plain data; classes that settings are made of (enums, NumPy's
random state) become inert objects, and any other name ends the reading. Nothing is executed.
"""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_lite.comm.mesh import Axis
from megatron_lite.config import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron_lite.convert.hf_files import TorchSource
from megatron_lite.convert.links import ConversionError, Link, check_links, our_stage, our_tensors
from megatron_lite.convert.native import from_links, metadata, write_native

# Names in their pickles that settings and random states are made of: read as objects that do nothing.
INERT = re.compile(r"(megatron|transformer_engine|numpy|types|signal|enum|pathlib|collections)\..*|_codecs\.encode")
FILE = "model_optim_rng.pt"
# Theirs -> ours, on names without the outer modules; the first that fits. Both generations of their module names.
LAYER_NAMES = (
    (r"(input_layernorm|input_norm|self_attention\.linear_qkv\.layer_norm)[._]", "input_layernorm."),
    (r"(pre_mlp_layernorm|post_attention_layernorm|post_attention_norm|mlp\.linear_fc1\.layer_norm)[._]",
     "post_attention_layernorm."),
    (r"self_attention\.(linear_qkv|query_key_value)\.", "self_attn.qkv_proj."),
    (r"self_attention\.(linear_proj|dense)\.", "self_attn.o_proj."),
    (r"self_attention\.([qk])_layernorm\.", r"self_attn.\1_norm."),
    (r"mlp\.(linear_fc1|dense_h_to_4h)\.", "mlp.UP."),
    (r"mlp\.(linear_fc2|dense_4h_to_h)\.", "mlp.down_proj."),
)  # fmt: skip
OUTER_NAMES = (
    (r"(embedding\.)?word_embeddings\.", "embed_tokens."),
    (r"(embedding\.)?position_embeddings\.", "embed_positions."),
    (r"(final_layernorm|final_norm)\.", "norm."),
    (r"(output_layer|word_embeddings_for_head)\.", "lm_head."),
)
# Their settings that change what the model computes and that are not built here.
REFUSED = ("apply_layernorm_1p", "squared_relu", "num_experts", "multi_latent_attention", "quick_geglu", "window_size",
           "apply_residual_connection_post_layernorm", "add_class_head")  # fmt: skip


class Inert:
    """Stands for an object of a class that is not looked up."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, _: Any) -> None:
        pass


class Opened(NamedTuple):
    """A Megatron checkpoint, understood."""

    source: TorchSource
    config: Config
    links: list[Link]
    notes: list[str]


def open_megatron(folder: Path, given: Mapping[str, Any]) -> Opened:
    """Everything that can be wrong is found here. `given`: settings that win over the files'. Raises ConversionError."""
    place = iteration_of(folder)
    files = {ranks: load(path / FILE) for ranks, path in rank_folders(place).items()}
    tp, pp = (max(rank[i] for rank in files) + 1 for i in (0, 1))
    gone = [f"tp rank {t}, pp rank {p}" for t in range(tp) for p in range(pp) if (t, p) not in files]
    if gone:
        raise ConversionError(f"{place} lacks the files of:", gone)
    chunks = {ranks: chunks_of(state, place) for ranks, state in files.items()}
    args = vars(files[0, 0].get("args", argparse.Namespace()))
    model = model_settings(args, given)
    vocab = given.get("vocab_size") or args.get("vocab_size")
    if vocab is None:
        padded = chunks[0, 0][0]["embed_tokens.weight"].shape[0] * tp
        raise ConversionError(f"{place} does not say the true vocabulary, only its padded size {padded}: give -- --vocab-size N")
    source, links, ignored = link_all(chunks, model, vocab, tp, pp)
    shapes = {name: kind.shape for name, kind in source.kinds.items() if name not in ignored}
    check_links(links, our_tensors(model, vocab), shapes)
    dtypes = sorted({kind.dtype for kind in source.kinds.values()})
    notes = [f"{place}: tp {tp}, pp {pp}, {len(chunks[0, 0])} chunk(s), {', '.join(dtypes)}; weights only, the optimizer "
             "is not converted"]  # fmt: skip
    precision = PrecisionConfig(bf16="bfloat16" in dtypes)
    return Opened(source, Config(model=model, data=DataConfig(vocab_size=vocab), precision=precision), links, notes)


def megatron_to_native(directory: Path, opened: Opened, done: Callable[[int], None]) -> Path:
    """Write the model as iteration 0 of a new checkpoint directory; its folder."""
    tensors = from_links(opened.source, opened.links)
    return write_native(directory, tensors, metadata(opened.config, "Megatron-LM"), lambda staging: None, done)


def iteration_of(folder: Path) -> Path:
    """The folder of the latest iteration; `folder` itself where it holds the ranks' folders."""
    if not folder.is_dir():
        raise ConversionError(f"--load {folder} is not a folder")
    tracker, place = folder / "latest_checkpointed_iteration.txt", folder
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if text != "release" and not text.isdigit():
            raise ConversionError(f"{tracker} must hold an iteration number or 'release', not {text[:64]!r}")
        place = folder / (text if text == "release" else f"iter_{int(text):07d}")
    if (place / ".metadata").exists() or any(place.glob("*.distcp")):
        raise ConversionError(f"{place} is in torch_dist format, whose index (.metadata) is a pickle of classes: reading "
                              "it means running it. Refused; let Megatron write it again with --ckpt-convert-format torch")
    return place


def rank_folders(place: Path) -> dict[tuple[int, int], Path]:
    """{(tp rank, pp rank): folder}"""
    found = {}
    for path in sorted(place.glob("mp_rank_*")):
        match = re.fullmatch(r"mp_rank_(\d+)(?:_(\d+))?(_\d+)?", path.name)
        if match and match[3]:
            raise ConversionError(f"{path}: expert-parallel files are not read here")
        if match:
            found[int(match[1]), int(match[2] or 0)] = path
    if not found:
        names = ", ".join(sorted(path.name for path in place.iterdir())[:10]) if place.is_dir() else "is not there"
        raise ConversionError(f"{place} has no mp_rank_XX folders: {names}")
    return found


def load(path: Path) -> dict[str, Any]:
    """The state in one rank's file, without running anything. ConversionError, naming the file, where it is not one."""
    if not path.is_file():
        raise ConversionError(f"{path} does not exist")
    mapped = zipfile.is_zipfile(path)
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) if mapped else []
        refused = sorted(name for name in names if name != "argparse.Namespace" and not INERT.fullmatch(name))
        if refused:
            raise ConversionError(f"{path} is refused, nothing in it was executed. Its pickle names:", refused)
        stand_ins = [(Inert, name) for name in names if name != "argparse.Namespace"]
        with torch.serialization.safe_globals([*stand_ins, argparse.Namespace]):
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise ConversionError(f"{path} is refused, nothing in it was executed: {str(error).splitlines()[0]}") from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise ConversionError(f"{path} cannot be read as a file of torch.save: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ConversionError(f"{path} does not hold the state of a Megatron rank")
    return state


def chunks_of(state: Mapping[str, Any], place: Path) -> list[dict[str, torch.Tensor]]:
    """The virtual stages of one rank, under our names with their own layer numbers."""
    keys = ["model"] if "model" in state else sorted((k for k in state if re.fullmatch(r"model\d+", k)), key=lambda k: int(k[5:]))
    if not keys:
        raise ConversionError(f"{place}: a rank's file has no model in it, only {', '.join(map(str, state))}")
    return [{our_name(name): value for name, value in flatten(state[key]).items()} for key in keys]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """Nested tables of tensors as one; what is no tensor (_extra_state) is left out."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        elif isinstance(value, torch.Tensor) and not key.endswith("_extra_state"):
            flat[prefix + key] = value
    return flat


def our_name(name: str) -> str:
    """`decoder.layers.0.self_attention.linear_qkv.weight` -> `layers.0.self_attn.qkv_proj.weight`; unknown ones stay."""
    inner = re.sub(r"^(module\.)*(language_model\.)?((encoder|decoder|transformer)\.)?", "", name)
    layer = re.match(r"layers\.\d+\.", inner)
    start = layer[0] if layer else ""
    for pattern, ours in LAYER_NAMES if layer else OUTER_NAMES:
        found, count = re.subn("^" + pattern, ours, inner.removeprefix(start))
        if count:
            return start + found
    return name


def model_settings(args: Mapping[str, Any], given: Mapping[str, Any]) -> ModelConfig:
    """Our model, from the arguments in the files and the flags given beside them."""
    wrong = [f"{name} {args[name]}" for name in REFUSED if args.get(name)]
    if wrong:
        raise ConversionError("the files' arguments describe a model that is not built here:", wrong)
    names = {field.name for field in fields(ModelConfig)} - {"model"}
    values = {name: args[name] for name in names if args.get(name) is not None and not isinstance(args[name], Inert)}
    values["disable_bias_linear"] = not args.get("add_bias_linear", True)
    values.setdefault("norm_epsilon", args.get("layernorm_epsilon", 1e-5))
    if args.get("use_rotary_position_embeddings"):
        values["position_embedding_type"] = "rope"
    # Their fused bias and GELU is the tanh form, whatever --openai-gelu says.
    fused = args.get("bias_gelu_fusion", False) and not values["disable_bias_linear"] and not values.get("swiglu")
    values["openai_gelu"] = bool(values.get("openai_gelu") or fused) and not values.get("swiglu")
    values |= {name: value for name, value in given.items() if name in names}
    lacking = [f"--{name.replace('_', '-')}" for name in ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size",
               "seq_length") if values.get(name) is None]  # fmt: skip
    if lacking:
        raise ConversionError("the files do not say these settings; give them after -- :", lacking)
    model = ModelConfig(**values)
    if not model.group_query_attention:
        model = replace(model, num_query_groups=None)
    return replace(model, kv_channels=model.kv_channels or model.hidden_size // model.num_attention_heads,
                   max_position_embeddings=model.max_position_embeddings or model.seq_length)  # fmt: skip


def link_all(chunks: Mapping[tuple[int, int], list[dict[str, torch.Tensor]]], model: ModelConfig, vocab: int, tp: int,
             pp: int) -> tuple[TorchSource, list[Link], set[str]]:  # fmt: skip
    """(all ranks' tensors under one name each, their links, those that hold nothing of ours). Chunk c of all stages comes
    before chunk c + 1 of any."""
    tensors, links, ignored = {}, [], set()
    start, depth = 0, len(chunks[0, 0])
    total = sum(layers_in(chunk) for p in range(pp) for chunk in chunks[0, p])
    if total != model.num_layers:
        raise ConversionError(f"the files hold {total} layers, --num-layers is {model.num_layers}")
    for c in range(depth):
        for p in range(pp):
            count = layers_in(chunks[0, p][c])
            first, last = c == p == 0, c == depth - 1 and p == pp - 1
            for t in range(tp):
                own = {f"tp{t}.pp{p}.chunk{c}.{global_name(n, start, model)}": v for n, v in chunks[t, p][c].items()}
                tensors |= own
                rows = next((v.shape[0] for n, v in own.items() if n.endswith(("embed_tokens.weight", "lm_head.weight"))), 0)
                axis = Axis("tp", t, tuple(range(tp)))
                stage = our_stage(model, vocab, rows * tp or vocab, range(start, start + count), first, last, axis)
                for param in stage.parameters():
                    name = "lm_head.weight" if param.shard.tied else param.shard.name
                    theirs = f"tp{t}.pp{p}.chunk{c}.{name}"
                    matrix = name in ("embed_tokens.weight", "lm_head.weight")
                    links += [Link(box, theirs, padded=matrix, alias=param.shard.tied or not box.owned)
                              for box in param.shard.boxes]  # fmt: skip
                    if not param.shard.boxes:  # all of its rows are padding of the vocabulary
                        ignored.add(theirs)
            start += count
    return TorchSource(tensors), links, ignored


def layers_in(chunk: Mapping[str, Any]) -> int:
    return 1 + max((int(name.split(".")[1]) for name in chunk if re.match(r"layers\.\d+\.", name)), default=-1)


def global_name(name: str, start: int, model: ModelConfig) -> str:
    """Our name with the layer's number in the whole model, and the fused MLP matrix by its kind."""
    name = re.sub(r"^layers\.(\d+)\.", lambda m: f"layers.{int(m[1]) + start}.", name)
    return name.replace("mlp.UP.", "mlp.gate_up_proj." if model.swiglu else "mlp.up_proj.")
