"""Validation sets by name, and a set as a whole."""

import numpy as np
import pytest

from megatron_lite.arguments import parse
from megatron_lite.data.blend import BlendedSamples
from megatron_lite.data.indexed import DataError, IndexedDataset, IndexedWriter
from megatron_lite.data.samples import WindowSamples
from megatron_lite.data.sets import EachOnce, read_sets


@pytest.mark.parametrize("words, sets", [
    ("A", {"": ("A",)}), ("0.3 A 0.7 B", {"": ("0.3", "A", "0.7", "B")}), ("", {}),
    ("web=A", {"web": ("A",)}), ("web=A code=B", {"web": ("A",), "code": ("B",)}),
    ("web=0.7 A 0.3 B code=C D", {"web": ("0.7", "A", "0.3", "B"), "code": ("C", "D")}),
    ("web= A c4.en-x=/d/a=b", {"web": ("A",), "c4.en-x": ("/d/a=b",)}),
    ("./lang=en/a", {"": ("./lang=en/a",)}), ("/data/lang=en/a", {"": ("/data/lang=en/a",)}),
])  # fmt: skip
def test_names(words, sets):
    assert read_sets(words.split()) == sets


@pytest.mark.parametrize("words, message", [
    ("A web=B", "A stands before the first name"), ("web=A web=B", "two validation sets are called web"),
    ("web= code=B", "the validation set web names no data"),
])  # fmt: skip
def test_names_that_cannot_be(words, message):
    with pytest.raises(DataError, match=message):
        read_sets(words.split())


FLAGS = ("--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 40 --lr 1e-3 --micro-batch-size 2 "
         "--train-iters 4 --train-data-path /x/a")  # fmt: skip


@pytest.mark.parametrize("flags, message", [
    ("--eval-interval 2 --valid-data-path a=A b=B --full-validation", None),
    ("--eval-interval 2 --valid-data-path A a=B", "stands before the first name"),
    ("--eval-interval 2 --valid-data-path a=0.3 A x B", "word 3, x, stands where a weight is expected"),
    ("--eval-interval 2 --valid-data-path 1 A 2 B --full-validation", "weights have no effect; drop the weights"),
    ("--eval-interval 2 --valid-data-path A --full-validation --eval-iters 3", "--full-validation scores whole sets"),
    ("--full-validation", "--full-validation: has no effect: needs --eval-interval"),
    ("--eval-interval 2 --valid-data-path A B --multiple-validation-sets", "--valid-data-path web=A code=B"),
])  # fmt: skip
def test_flags(flags, message):
    problems = [str(problem) for problem in parse(f"{FLAGS} {flags}".split(), 1)[1]]
    assert problems == [] if message is None else len(problems) == 1 and message in problems[0], problems


def test_each_sample_once(tmp_path):
    sources = []
    for name, tokens in (("a", 21), ("b", 9), ("c", 50)):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document(np.arange(tokens) + 100 * len(sources))
        sources.append(WindowSamples(IndexedDataset(tmp_path / name), 4, seed=len(sources)))
    whole = EachOnce(BlendedSamples(sources))
    assert len(whole) == 5 + 2 + 12
    firsts = sorted(int(whole[n][0]) for n in range(len(whole)))
    assert firsts == sorted(100 * n + 4 * w for n, source in enumerate(sources) for w in range(len(source)))
    assert [whole[n].tolist() for n in range(5, 7)] == [sources[1][n].tolist() for n in range(2)]
    assert len(EachOnce(sources[0])) == 5
    for wrong in (-1, 19):
        with pytest.raises(IndexError):
            whole[wrong]
