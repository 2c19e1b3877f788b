"""One run at a time saves into a folder; one that cannot be written is named before anything is computed."""

import json
import os

import pytest

from megatron_lite.checkpoint import claim as claims
from megatron_lite.checkpoint.agree import CheckpointError
from megatron_lite.checkpoint.claim import FILE, claim
from megatron_lite.comm.mesh import single


def test_the_second_is_refused_until_the_first_has_left(tmp_path):
    first = claim(tmp_path / "new" / "save", single())
    with pytest.raises(CheckpointError, match=f"another run saves into it .process {os.getpid()} on .*a folder of its own"):
        claim(tmp_path / "new" / "save", single(), patience=0.0)
    claim(tmp_path / "other", single()).release()
    first.release()
    again = claim(tmp_path / "new" / "save", single(), patience=0.0)
    assert again.run == first.run  # the word stays with the folder
    again.release()


@pytest.mark.parametrize("text", [b"", b'{"run": "cut', b"[1]\n", b"\x80\x04\x95garbage"])
def test_whatever_the_file_holds(tmp_path, text):
    (tmp_path / FILE).write_bytes(text)
    held = claim(tmp_path, single())
    assert json.loads((tmp_path / FILE).read_text())["run"] == held.run and len(held.run) == 16
    held.release()


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="--save .*/file: nothing can be written there: "):
        claim(tmp_path / "file", single())

    def read_only(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(claims.tempfile, "TemporaryFile", read_only)
    with pytest.raises(CheckpointError, match="nothing can be written there: Read-only file system"):
        claim(tmp_path / "there", single())


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(claims.fcntl, "flock", none)
    claim(tmp_path, single()).release()
