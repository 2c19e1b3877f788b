"""tools/inspect_checkpoint.py: lists, checks every byte, compares two layouts of one state."""

import json

import pytest
from safetensors.torch import load_file, save_file

from tests.checkpoint.checkpoint_model import full_state, play_save, rank_pieces
from tools.inspect_checkpoint import main


@pytest.fixture
def two(tmp_path):
    """One state, written by one rank and by two."""
    return [play_save(tmp_path / str(n), 7, [rank_pieces(full_state(), n, rank) for rank in range(n)], {"wandb_id": "x"})
            for n in (1, 2)]  # fmt: skip


def said(capsys, *flags):
    try:
        code = main([str(flag) for flag in flags])
    except SystemExit as end:
        code = end.code
    seen = capsys.readouterr()
    return code, seen.out + seen.err


def test_it_lists_and_checks(two, capsys):
    code, text = said(capsys, two[1].parent, "--check")
    assert code == 0 and "iteration 7: 2 files" in text and "model/norm.weight" in text and "every checksum fits" in text
    code, text = said(capsys, two[1], "--json")
    found = json.loads(text)
    assert found["iteration"] == 7 and found["meta"] == {"wandb_id": "x"} and "problems" not in found
    names = {row["tensor"]: row for row in found["tensors"]}
    assert names["model/embed.weight"]["shape"] == [10, 16] and names["model/embed.weight"]["blocks"] == 2


def test_every_kind_of_damage_is_named(two, capsys):
    shard = two[1] / "shard_00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "shard_00001.safetensors is damaged: the checksum of" in said(capsys, two[1], "--check")[1]
    shard.write_bytes(whole[:-1])
    assert "it is truncated" in said(capsys, two[1], "--check")[1]
    tensors = load_file(two[0] / "shard_00000.safetensors")
    lost = tensors.pop("model/norm.weight")
    save_file(tensors | {"model/extra": lost}, two[0] / "shard_00000.safetensors")
    code, text = said(capsys, two[0], "--check")
    assert code == 1 and "lacks model/norm.weight" in text
    shard.unlink()
    code, text = said(capsys, two[1], "--check")
    assert code == 1 and "shard_00001.safetensors: No such file" in text
    (two[1] / "manifest.json").unlink()
    code, text = said(capsys, two[1])
    assert code == 1 and "manifest.json" in text


def test_extra_tensors_and_files_are_named(two, capsys):
    path = two[0] / "shard_00000.safetensors"
    tensors = load_file(path)
    save_file(tensors, two[0] / "shard_00009.safetensors")
    save_file(tensors | {"model/extra": tensors["model/norm.weight"].clone()}, path)
    code, text = said(capsys, two[0], "--check")
    assert code == 1 and "holds model/extra, which is not in the manifest" in text
    assert "shard_00009.safetensors is not in the manifest" in text


def test_it_compares(two, tmp_path, capsys):
    code, text = said(capsys, *two)
    assert code == 0 and "0 of" in text and "differ" in text
    state = full_state()
    state["model/norm.weight"][3] += 0.5
    state["model/new.weight"] = state["model/norm.weight"]
    other = play_save(tmp_path / "other", 7, [rank_pieces(state, 1, 0)])
    code, text = said(capsys, two[1], other, "--json")
    found = json.loads(text)
    rows = {row["tensor"]: row for row in found["tensors"]}
    assert code == 1 and found["different"] == 1 and rows["model/norm.weight"]["largest"] == pytest.approx(0.5)


def test_wrong_use(two, tmp_path, capsys):
    assert said(capsys, tmp_path / "no") == (1, f"inspect_checkpoint: error: {tmp_path / 'no'} does not exist\n")
    assert said(capsys, two[0], "--iteration", 3)[0] == 1
    assert said(capsys, *two, two[0])[0] == 2 and said(capsys, *two, "--check")[0] == 2
