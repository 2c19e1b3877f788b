"""Batches, cuts and scores: tools/generate.py and tools/evaluate.py on a checkpoint of two tensor-parallel ranks."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_generate import CONFIG, GREEDY, LLAMA, SEQ, VOCAB, stages, write_checkpoint

from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.data.indexed import IndexedWriter
from megatron_lite.grid import Grid
from megatron_lite.training.generate import GenerateError, Sampling, check_cut, generate, generate_batch, load_model
from megatron_lite.training.score import ScoreError, answer, continuation, perplexity, read_task, score, windows
from tools import evaluate as evaluate_tool
from tools import generate as generate_tool

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), CONFIG))


def rows(*lengths, vocab=VOCAB):
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


def drawn(chunks, prompts, seeds, sampling, **more):
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    columns = list(generate_batch(chunks, prompts, 12, sampling, draws, **more))
    return [[token for token in row if token is not None] for row in zip(*columns, strict=True)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 20, 0.9)])
def test_a_row_is_what_it_would_be_alone(sampling):
    chunks, prompts = stages(LLAMA, VOCAB, range(1), range(1, 2)), rows(4, 1, 9)
    together = drawn(chunks, prompts, (5, 6, 7), sampling)
    assert together == [drawn(chunks, [p], [s], sampling)[0] for p, s in zip(prompts, (5, 6, 7), strict=True)]
    assert together == drawn(chunks, prompts, (5, 6, 7), sampling, keep=False)
    end = together[0][5]
    stopped = drawn(chunks, prompts, (5, 6, 7), sampling, end=end)
    assert stopped == [row[: row.index(end)] if end in row else row for row in together]


def test_text_slides_past_the_positions():
    chunks, prompts = stages(LLAMA, VOCAB, range(2)), rows(SEQ - 3, SEQ - 8)
    kept, anew = (drawn(chunks, prompts, (0, 1), GREEDY, keep=keep) for keep in (True, False))
    assert kept == anew
    ids = prompts[0] + kept[0]
    assert list(generate(chunks, ids[len(ids) - 1 - SEQ : -1], 1, GREEDY)) == [ids[-1]]


def test_every_token_is_scored_once():
    for n in (1, 2, 5, 16, 17, 40):
        for length, stride in ((4, 4), (4, 1), (16, 7), (100, 100)):
            found = list(windows(list(range(n)), length, stride))
            assert [i for w in found for i in w.ids[len(w.ids) - w.scored :]] == list(range(1, n))
            assert all(len(w.ids) <= length + 1 for w in found)


def use(rank, world, directory, tp):
    """Logits' consequences at a layout: greedy and drawn ids, losses of windows."""
    mesh = build_mesh(Grid(tp=tp, dp=world // tp), torch.device("cpu"))
    _, chunks, _ = load_model(directory, mesh=mesh)
    prompts = rows(4, 1, 9, vocab=257)
    found = [window for ids in rows(30, 5, 70, 12, vocab=257) for window in windows(ids, 16, 6)]
    return (drawn(chunks, prompts, (1, 2, 3), GREEDY), drawn(chunks, prompts, (1, 2, 3), Sampling(1.0, 0, 0.9)),
            score(chunks, found, mesh, 3))  # fmt: skip


def test_layouts_agree(pool, checkpoint):
    alone = use(0, 1, checkpoint, 1)
    for world, tp in ((2, 1), (2, 2), (4, 2), (4, 4)):
        results = pool.run(use, world, world, checkpoint, tp)
        assert all(result == results[0] for result in results)
        assert results[0][:2] == alone[:2]
        assert results[0][2] == (alone[2] if tp == 1 else pytest.approx(alone[2], rel=1e-5))


def test_a_cut_that_does_not_fit():
    with pytest.raises(GenerateError, match="--tensor-model-parallel-size 3: 4 query heads.*these work: 1, 2, 4"):
        check_cut(LLAMA, 3)


def test_choices_by_hand(tmp_path):
    chunks = stages(LLAMA, VOCAB, range(2))
    encode = lambda text: [int(word) for word in text.split()]  # noqa: E731
    records = [{"context": "1 2 3", "choices": ["4 5", "6", "7 8 9"], "gold": 1},
               {"query": "9 9 ", "choices": ["1", "2 2 2 2"], "gold": 0},
               {"context": "", "choices": ["11 12", "13"], "gold": 1}]  # fmt: skip
    file = tmp_path / "task.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    questions = read_task(str(file), encode, 0, 16, " ", None)
    expected = []
    for record in records:
        context, sums = encode(record.get("context", record.get("query"))) or [0], []
        for choice in record["choices"]:
            ids = context + encode(choice)
            with torch.no_grad():
                logits = chunks[0].logits(chunks[0].hidden(torch.tensor([ids]), None))[:, 0, :VOCAB]
            log = torch.log_softmax(logits, -1)
            sums.append(sum(-float(log[i - 1, ids[i]]) for i in range(len(context), len(ids))))
        expected.append(sums)
    flat = [window for question in questions for window in question.windows]
    assert score(chunks, flat, single(), 2) == pytest.approx([x for sums in expected for x in sums], rel=1e-10)
    found = answer(chunks, questions, single(), 2)
    golds = [record["gold"] for record in records]
    by = {"accuracy": [sums.index(min(sums)) for sums in expected],
          "accuracy_norm": [(per := [x / len(c) for x, c in zip(sums, r["choices"], strict=True)]).index(min(per))
                            for sums, r in zip(expected, records, strict=True)]}  # fmt: skip
    for name, picked in by.items():
        assert found[name] == sum(p == g for p, g in zip(picked, golds, strict=True)) / 3
    tokens = sum(len(encode(r["choices"][r["gold"]])) for r in records)
    assert found["gold_loss"] == pytest.approx(sum(s[g] for s, g in zip(expected, golds, strict=True)) / tokens, rel=1e-10)
    assert len(read_task(str(file), encode, 0, 16, " ", 2)) == 2


def test_blanks_between_context_and_choice():
    encode = lambda text: list(text.encode())  # noqa: E731
    ids = lambda context, choice: bytes(continuation(encode, context, choice, 0, 99, " ").ids)  # noqa: E731
    assert ids("a:", "b") == ids("a: ", "b") == ids("a:", " b") == b"a: b"
    assert continuation(encode, "a: ", "b", 0, 99, " ").scored == 2  # the blank belongs to the choice
    assert ids("", "b") == b"\0b" and ids("a\n", "b") == b"a\nb"
    window = continuation(encode, "a long context", "end", 0, 6, " ")  # its beginning is left out
    assert bytes(window.ids) == b"ext end" and window.scored == 4


@pytest.mark.parametrize("line,words", [
    ("{", "line 1: Expecting"),
    ("[1]", "line 1: expected an object"),
    ('{"choices": ["a"], "gold": 0}', '"context" or "query"'),
    ('{"context": "a", "choices": [], "gold": 0}', '"choices", a list'),
    ('{"context": "a", "choices": ["b"], "gold": 1}', '"gold", a number from 0 to 0'),
    ('{"context": "a", "choices": ["bbbbbbbbb"], "gold": 0}', "larger --window"),
    ('{"context": "", "choices": ["b"], "gold": 0}', "the context is empty"),
    ("", "holds no record"),
])  # fmt: skip
def test_bad_tasks(line, words, tmp_path):
    file = tmp_path / "task.jsonl"
    file.write_text(line)
    with pytest.raises(ScoreError, match="task.jsonl") as error:
        read_task(str(file), lambda text: list(text.encode()), None, 8, " ", None)
    assert words in str(error.value)


def test_foreign_ids_and_nothing_to_score():
    chunks = stages(LLAMA, VOCAB, range(2))
    for documents, words in (([[1, VOCAB]], "vocabulary 0 to 95"), ([[1], []], "nothing to score")):
        with pytest.raises(ScoreError, match=words):
            perplexity(chunks, documents, single(), 8, 8, 2)


def corpus(folder):
    """A text file, the same text as a data set, and a task."""
    text = "def add(a, b):\n    return a + b\n" * 3
    (folder / "held_out.txt").write_text(text)
    with IndexedWriter(folder / "data", "<u2") as writer:
        writer.add_document([*text.encode(), 256])
    (folder / "task.jsonl").write_text(json.dumps({"context": "def", "choices": ["add", "sub"], "gold": 0}) + "\n")
    return ["--text", str(folder / "held_out.txt"), "--data-path", str(folder / "data"), "--task", str(folder / "task.jsonl")]


def test_evaluate_tool(checkpoint, tmp_path, capsys):
    files = corpus(tmp_path)
    assert evaluate_tool.main(["--load", checkpoint, *files, "--stride", "8", "--output", str(tmp_path / "out.json")]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out.json").read_text()) and printed["window"] == SEQ
    text, data, task = printed["results"].values()
    assert text["tokens"] == 96 and data["tokens"] == 97 and task["questions"] == 1  # one more: the end of the document
    assert text["bits_per_byte"] == pytest.approx(text["loss"] / math.log(2))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    cut = [*torchrun, "tools/evaluate.py", "--load", checkpoint, *files, "--stride", "8", "--device", "cpu",
           "--tensor-model-parallel-size", "2"]  # fmt: skip
    done = subprocess.run(cut, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for name, values in json.loads(done.stdout)["results"].items():
        assert values == pytest.approx(printed["results"][name], rel=1e-5)


def test_generate_tool_with_many_prompts(checkpoint, tmp_path, capsys):
    file = tmp_path / "prompts.txt"
    file.write_text("import os\nclass\n")
    flags = ["--load", checkpoint, "--temperature", "0", "--max-new-tokens", "6"]
    assert generate_tool.main([*flags, "--prompt", "def ", "--prompt-file", str(file), "--jsonl"]) == 0
    out, err = capsys.readouterr()
    together = [json.loads(line) for line in out.splitlines()]
    assert [record["prompt"] for record in together] == ["def ", "import os", "class"] and "tokens/s" in err
    assert generate_tool.main([*flags, "--prompt", "class", "--no-kv-cache"]) == 0
    assert capsys.readouterr().out == "class" + together[2]["text"] + "\n"


@pytest.mark.parametrize("tool,flags,code,words", [
    (generate_tool, [], 2, "expected --prompt or --prompt-file"),
    (generate_tool, ["--prompt", "x", "--pipeline-model-parallel-size", "2"], 2, "used without a pipeline"),
    (generate_tool, ["--prompt", "x", "--tensor-model-parallel-size", "2"], 2, "the launcher started 1 rank(s): expected 1"),
    (generate_tool, ["--prompt", "x" * 40], 1, "a prompt has 40 tokens, but the model's positions end after 32"),
    (generate_tool, ["--prompt", "x" * 30, "--max-new-tokens", "9"], 1, "leaves room for 3"),
    (generate_tool, ["--prompt-file", "EMPTY"], 1, "holds no prompt"),
    (evaluate_tool, [], 2, "expected at least one of"),
    (evaluate_tool, ["--text", "no.txt", "--stride", "0"], 2, "--stride 0: expected 1 or more"),
    (evaluate_tool, ["--text", "no.txt", "--window", "33"], 1, "positions end after 32: use 32 or less"),
    (evaluate_tool, ["--text", "no.txt", "--stride", "33"], 1, "--stride 33"),
    (evaluate_tool, ["--text", "no.txt"], 1, "no.txt"),
    (evaluate_tool, ["--data-path", "nothing"], 1, "nothing.idx: no such file"),
])  # fmt: skip
def test_refusals_in_words(tool, flags, code, words, checkpoint, tmp_path, capsys):
    (tmp_path / "empty").write_text("")
    with pytest.raises(SystemExit) as stop:
        tool.main(["--load", checkpoint, *[str(tmp_path / "empty") if flag == "EMPTY" else flag for flag in flags]])
    assert stop.value.code == code and words in capsys.readouterr().err
