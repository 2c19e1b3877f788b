"""A Hugging Face folder -> a checkpoint of ours, and back.

    <save>/iter_0000000/shard_00000.safetensors ...   the weights, under our names, in their dtype
    <save>/iter_0000000/hf/                           config.json, generation_config.json, tokenizer files, as they were
    <save>/iter_0000000/hf_layout.json                the headers of the weight files, so that they can be written again

The way back of an unchanged import gives the same bytes in every file.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from megatron_lite.checkpoint.folder import iteration_name, sync_folder, write_durably
from megatron_lite.config import Config, DataConfig, ModelConfig, PrecisionConfig
from megatron_lite.convert.families import family_of_json, family_of_model
from megatron_lite.convert.hf_files import (
    FilePlan,
    Kind,
    SafetensorsSource,
    Source,
    bytes_of,
    index_text,
    open_weights,
    plan_files,
    read_json,
    same_files,
    write_file,
)
from megatron_lite.convert.links import ConversionError, Link, by_theirs, check_links, our_tensors, their_shape
from megatron_lite.convert.native import OTHER, NativeReader, from_links, metadata, write_native

CARRIED = {".json", ".txt", ".model", ".jinja", ".md", ".tiktoken"}
CARRIED_FOLDER, LAYOUT = "hf", "hf_layout.json"
WEIGHT_FILES = re.compile(r".*\.(safetensors|bin|pt|pth|h5|msgpack|onnx|gguf|ot)(\.index\.json)?")
TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens_map", "added_tokens", "chat_template", "spiece")
# Tensors that old files hold beside the parameters; what they say follows from the configuration.
BUFFERS = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias)")
# Dropout, lengths, initial weights and what evens out the load of experts are no part of what a model computes.
FREE = {"model", "seq_length", "max_position_embeddings", "hidden_dropout", "attention_dropout", "init_method_std",
        "label_smoothing", "make_vocab_size_divisible_by", "ffn_hidden_size", "moe_router_load_balancing_type",
        "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate", "moe_expert_capacity_factor"}  # fmt: skip

Progress = Callable[[int], None]


class Opened(NamedTuple):
    """A Hugging Face folder, understood: its weights, our configuration, the links between both, lines to tell."""

    source: Source
    family: ModuleType
    config: Config
    links: list[Link]
    notes: list[str]


def open_folder(folder: Path) -> Opened:
    """Everything that can be wrong is found here, before anything is written. Raises ConversionError."""
    body = read_json(folder / "config.json")
    if not isinstance(body, dict):
        raise ConversionError(f"{folder / 'config.json'} holds no settings")
    family = family_of_json(body)
    model, vocab = family.settings(body)
    source = open_weights(folder)
    targets = our_tensors(model, vocab)
    links = family.links(targets, source.kinds)
    shapes = {name: kind.shape for name, kind in source.kinds.items() if not BUFFERS.fullmatch(name)}
    check_links(links, targets, shapes)
    check_aliases(source, links)
    dtypes = sorted({source.kinds[name].dtype for name in shapes})
    notes = [f"{family.ARCHITECTURE}, {len(targets)} tensors in {', '.join(dtypes)}"]
    buffers = sorted(set(source.kinds) - set(shapes))
    if buffers:
        notes.append(f"{len(buffers)} tensors are no parameters and follow from the configuration: {', '.join(buffers[:3])} ...")
    reach = body.get("max_position_embeddings")
    if reach and model.max_position_embeddings < reach:
        notes.append(f"WARNING: attention sees {model.max_position_embeddings} tokens back (sliding_window), which is not built "
                     f"here: samples can be no longer than that, where it makes no difference")  # fmt: skip
    precision = PrecisionConfig(bf16="bfloat16" in dtypes)
    return Opened(source, family, Config(model=model, data=DataConfig(vocab_size=vocab), precision=precision), links, notes)


def check_aliases(source: Source, links: list[Link]) -> None:
    """An output layer that is stored although it is tied must be what it is tied to."""
    for alias in (link for link in links if link.alias and link.theirs in source.kinds):
        first = next(link for link in links if link.box.name == alias.box.name and not link.alias)
        kinds = source.kinds[alias.theirs], source.kinds[first.theirs]
        rows, width = kinds[0].shape
        step = max(1, (4 << 20) // width)
        equal = kinds[0] == kinds[1]
        for start in range(0, rows if equal else 0, step):
            length = min(step, rows - start), width
            pair = [torch.empty(length, dtype=getattr(torch, kind.dtype)) for kind in kinds]
            for link, target in zip((alias, first), pair, strict=True):
                source.read(link.theirs, (start, 0), length, target)
            equal = equal and torch.equal(*pair)
        if not equal:
            raise ConversionError(f"{alias.theirs} is not {first.theirs}, though config.json ties them: "
                                  f"set tie_word_embeddings to false there, or remove one")  # fmt: skip


def hf_to_native(folder: Path, directory: Path, opened: Opened, done: Progress) -> tuple[Path, Config]:
    """Write the folder's model as iteration 0 of a new checkpoint directory: (its folder, the configuration it names)."""
    source = opened.source
    tensors = from_links(source, opened.links)
    layout = {}
    if isinstance(source, SafetensorsSource):
        layout = source.headers
        for name, kind in source.kinds.items():
            if BUFFERS.fullmatch(name):
                tensors[f"{OTHER}/{name}"] = kind, partial(read_whole, source, name, kind)
    files = [path for path in sorted(folder.iterdir()) if carried(path)]
    place = directory / iteration_name(0) / CARRIED_FOLDER
    config = replace(opened.config, data=replace(opened.config.data, **tokenizer_settings(place, [f.name for f in files])))

    def carry(staging: Path) -> None:
        copy_files(files, staging / CARRIED_FOLDER)
        write_durably(staging / LAYOUT, json.dumps(layout))

    return write_native(directory, tensors, metadata(config, opened.family.ARCHITECTURE), carry, done), config


def read_whole(source: Source, name: str, kind: Kind) -> torch.Tensor:
    tensor = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
    source.read(name, (0,) * len(kind.shape), kind.shape, tensor)
    return tensor


def carried(path: Path) -> bool:
    """Files beside the weights that belong to the model. Never code, never pickles."""
    text = path.suffix in CARRIED or path.name.startswith(("LICENSE", "NOTICE"))
    return path.is_file() and text and (not WEIGHT_FILES.fullmatch(path.name) or path.name == "model.safetensors.index.json")


def copy_files(files: list[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)
    sync_folder(folder)


def tokenizer_settings(folder: Path, names: list[str]) -> dict[str, Any]:
    """The tokenizer flags of a folder with these files."""
    if {"tokenizer.json", "tokenizer_config.json", "vocab.json"} & set(names):
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    if "tokenizer.model" in names:
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / "tokenizer.model")}
    return {}


class Export(NamedTuple):
    """A checkpoint of ours, ready to be written as a Hugging Face folder: what goes into which file, and lines to tell."""

    reader: NativeReader
    links: dict[str, list[Link]]
    kinds: dict[str, Kind]
    plans: list[FilePlan]
    texts: dict[str, str]
    copies: list[Path]
    notes: list[str]


def plan_export(reader: NativeReader, config: Config, dtype: str | None, limit: int | None, like: Path | None) -> Export:
    """Everything that can be wrong is found here, before anything is written. Raises ConversionError, CheckpointError.

    dtype  of the exported weights (None: as they are stored; a bf16 run stores fp32 masters)
    limit  bytes per file (None: the files that were imported, or 5 GB)
    like   a Hugging Face folder whose config.json and tokenizer files the export gets
    """
    imported = like or reader.folder / CARRIED_FOLDER
    body = read_json(imported / "config.json") if like or (imported / "config.json").is_file() else None
    layout = reader.folder / LAYOUT
    headers = read_json(layout) if layout.is_file() and dtype is None and limit is None else {}
    plans = same_files(headers)
    there = {name: None for plan in plans for name in plan.tensors}
    family = family_of_model(config.model) if body is None else family_of_json(body)
    if body is not None:
        check_same(config, *family.settings(body))
    targets = our_tensors(config.model, config.data.vocab_size)
    links = by_theirs(link for link in family.links(targets, there) if not link.alias or link.theirs in there)
    kinds = export_kinds(reader, links, dtype)
    other = {name: kind for name, kind in reader.kinds(OTHER).items() if name in there}
    notes = [f"{family.ARCHITECTURE}, {len(kinds)} tensors in {', '.join(sorted({kind.dtype for kind in kinds.values()}))}"]
    if not plans or not fits(plans, headers, kinds | other):
        plans, other = plan_files(kinds, limit or 5 * 10**9), {}
    kinds = kinds | other
    texts = {"model.safetensors.index.json": index_text(plans, kinds)} if len(plans) > 1 else {}
    same = bool(headers) and plans[0].header == next(iter(headers.values()), None)
    copies, written = files_beside(imported, config, body is not None)
    if same:  # the index too is the one that came
        texts = {} if any(path.name == "model.safetensors.index.json" for path in copies) else texts
    else:
        copies = [path for path in copies if path.name != "model.safetensors.index.json"]
    main = next(iter(kinds.values())).dtype
    if body is None:
        body = {"architectures": [family.ARCHITECTURE], "model_type": family.MODEL_TYPE,
                **family.to_json(config.model, config.data.vocab_size), **special_ids(copies), "torch_dtype": main}  # fmt: skip
        texts["config.json"] = json.dumps(body, indent=2) + "\n"
    elif not same and main != (body.get("dtype") or body.get("torch_dtype") or main):
        key = "dtype" if body.get("dtype") else "torch_dtype"
        texts["config.json"] = json.dumps(body | {key: main}, indent=2) + "\n"
    return Export(reader, links, kinds, plans, texts, [p for p in copies if p.name not in texts], notes + written)


def fits(plans: list[FilePlan], headers: Mapping[str, str], kinds: Mapping[str, Kind]) -> bool:
    """Whether the imported files' headers are of exactly these tensors."""
    from_headers = {}
    for plan in plans:
        entries = json.loads(headers[plan.name])
        from_headers |= {name: (entries[name]["dtype"], tuple(entries[name]["shape"])) for name in plan.tensors}
    fresh = {}
    for plan in plan_files(kinds, 1 << 62):
        entries = json.loads(plan.header)
        fresh |= {name: (entries[name]["dtype"], tuple(entries[name]["shape"])) for name in plan.tensors}
    return from_headers == fresh


def export_kinds(reader: NativeReader, links: Mapping[str, list[Link]], dtype: str | None) -> dict[str, Kind]:
    """{their tensor: what it is}; each of ours must be stored, with its shape, and none may be left over."""
    stored, problems, kinds = reader.kinds(), [], {}
    for theirs, own in links.items():
        problems += [f"missing tensor {link.box.name}" for link in own if link.box.name not in stored]
        problems += [f"wrong shape of tensor {k.box.name}: {list(stored[k.box.name].shape)}, expected {list(k.box.full_shape)}"
                     for k in own if k.box.name in stored and stored[k.box.name].shape != k.box.full_shape]  # fmt: skip
        found = sorted({stored[link.box.name].dtype for link in own if link.box.name in stored})
        if found:
            kinds[theirs] = Kind(dtype or found[-1], their_shape(own))
    used = {link.box.name for own in links.values() for link in own}
    problems += [f"extra tensor {name}: this form has no place for it" for name in stored if name not in used]
    if problems:
        raise ConversionError(f"{reader.folder} does not hold the model it describes:", sorted(set(problems)))
    return kinds


def check_same(config: Config, model: ModelConfig, vocab: int) -> None:
    """The model of a config.json is the checkpoint's, in all that changes what it computes."""
    wrong = [f"--{f.name.replace('_', '-')}: checkpoint {getattr(config.model, f.name)}, config.json {getattr(model, f.name)}"
             for f in fields(ModelConfig) if f.name not in FREE and getattr(config.model, f.name) != getattr(model, f.name)]
    if vocab != config.data.vocab_size:
        wrong.append(f"--vocab-size: checkpoint {config.data.vocab_size}, config.json {vocab}")
    if wrong:
        raise ConversionError("config.json describes another model than the checkpoint:", wrong)


def files_beside(imported: Path, config: Config, whole: bool) -> tuple[list[Path], list[str]]:
    """Files to copy beside the weights: all of an imported folder's, or a native run's tokenizer. And a line about them."""
    if whole:
        return [path for path in sorted(imported.iterdir()) if carried(path)], []
    place = Path(config.data.tokenizer_model or "")
    if config.data.tokenizer_type == "SentencePieceTokenizer" and place.name == "tokenizer.model" and place.is_file():
        return [place], []
    if config.data.tokenizer_type == "HuggingFaceTokenizer" and place.is_dir():
        return [path for path in sorted(place.iterdir()) if carried(path) and path.name.startswith(TOKENIZER)], []
    return [], [f"no tokenizer files: the run's tokenizer was {config.data.tokenizer_type} {config.data.tokenizer_model or ''}"]


def special_ids(copies: list[Path]) -> dict[str, int | None]:
    """bos and eos ids of copied tokenizer files; none where they do not say, in place of the family's own defaults."""
    ids: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    files = {path.name: path for path in copies}
    if {"tokenizer.json", "tokenizer_config.json"} <= files.keys():
        named = read_json(files["tokenizer_config.json"])
        added = {token["content"]: token["id"] for token in read_json(files["tokenizer.json"]).get("added_tokens", [])}
        for key in ("bos_token", "eos_token"):
            token = named.get(key)
            ids[f"{key}_id"] = added.get(token["content"] if isinstance(token, dict) else token)
    return ids


def native_to_hf(export: Export, folder: Path, done: Progress) -> None:
    """Write the folder: complete under its name, or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConversionError(f"--save {folder} is there already: give a new folder")
    staging = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        copy_files(export.copies, staging)
        for name, text in export.texts.items():
            write_durably(staging / name, text)
        for plan in export.plans:
            for name in write_file(staging, plan, partial(produce, export)):
                done(bytes_of(export.kinds[name]))
        sync_folder(staging)
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def produce(export: Export, name: str) -> torch.Tensor:
    """One tensor of the export."""
    kind = export.kinds[name]
    if name in export.links:
        return export.reader.scatter(export.links[name], kind)
    return export.reader.whole(f"{OTHER}/{name}", kind)
