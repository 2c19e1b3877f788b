"""--profile: the trace of a real run has a range for every action and phase, on the ranks and iterations asked for."""

import json
from collections import Counter

from tests.robustness.test_bad_input import Job

RUN = ("--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --pipeline-model-parallel-size 2 "
       "--num-virtual-stages-per-pipeline-rank 2 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 3 "
       "--log-interval 1 --mock-data --vocab-size 64 --peak-tflops 1").split()  # fmt: skip


def ranges(path):
    """How often each named range of our own is in a Chrome trace."""
    events = json.loads(path.read_text())["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_a_window_of_two_steps_on_one_of_two_ranks(tmp_path, server):
    window = "--profile --profile-step-start 2 --profile-step-end 4 --profile-ranks 1".split()
    Job(tmp_path, *RUN, *window, "--save", tmp_path / "save", ranks=2).succeeds()
    [path] = (tmp_path / "save" / "profile").iterdir()
    assert path.name == "iter_0000002_to_0000003_rank_00001.json"
    found = ranges(path)
    expected = [f"{kind} chunk {chunk} microbatch {m}" for kind in ("F", "BW") for chunk in (0, 1) for m in (0, 1)]
    assert {name: found[name] for name in expected} == dict.fromkeys(expected, 2)
    assert {name: found[name] for name in ("data", "reduce", "norm", "optimizer")} == dict.fromkeys(
        ("data", "reduce", "norm", "optimizer"), 2)  # fmt: skip
    assert found["iteration 2"] == found["iteration 3"] == 1 and not found["iteration 1"]


def test_a_run_that_ends_within_the_window_writes_what_it_has(tmp_path, server):
    one = [*RUN[:6], "--seq-length", 16, *RUN[12:]]  # without a pipeline
    job = Job(tmp_path, *one, "--profile", "--profile-step-start", 3, "--trace-dir", tmp_path / "t")
    job.succeeds()
    assert "profile of iterations 3 to 3 written" in job.out()
    assert [path.name for path in (tmp_path / "t" / "profile").iterdir()] == ["iter_0000003_to_0000003_rank_00000.json"]
    assert len(list((tmp_path / "t").glob("iter_*"))) == 2  # the trace of actions, beside it
