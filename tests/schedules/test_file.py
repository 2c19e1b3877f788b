"""--pipeline-schedule-file: what a file says, and that a bad one is refused before launch, by file, line and action."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arguments import parse
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.report import dry_run_report
from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import ScheduleError
from megatron_lite.schedules.file import format_file, parse_file, read_schedule

BASE = ("--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 2 --lr 1e-3 --train-iters 9 "
        "--mock-data --vocab-size 250 --pipeline-model-parallel-size 2 --global-batch-size 4")  # fmt: skip
GOOD = "F0 F1 B0 W0 BW1\nF0 BW0 F1 B1 W1\n"
V = "placement v\nF0 F1 F0.1 B0.1 W0.1 B0 F1.1 BW1.1 W0 BW1\nF0 F0.1 B0.1 B0 F1 F1.1 BW1.1 BW1 W0 W0.1\n"


def config_with(tmp_path, text, flags=""):
    path = tmp_path / "mine.txt"
    if text is not None:
        path.write_text(text)
    return parse(f"{BASE} --pipeline-schedule-file {path} {flags}".split(), 2)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 16))
def test_what_is_written_is_read_again(name, p, m):
    chunks = SCHEDULES[name].default_chunks
    if schedule_problems(name, p, chunks, m):
        return
    schedule, placement = build_schedule(name, p, chunks, m), schedule_placement(name, p, chunks)
    file = parse_file(format_file(schedule, placement), "mine.txt")
    assert (file.schedule, file.placement(), file.num_microbatches) == (schedule, placement, m)
    assert file.problems(p, m) == []


def test_a_good_file_is_the_schedule(tmp_path):
    config, problems = config_with(tmp_path, f"# two ranks\n\n{GOOD}")
    assert problems == []
    pipeline = pipeline_of(config)
    assert (pipeline.schedule, pipeline.placement.kind, pipeline.num_chunks) == ("mine.txt", "loop", 1)
    assert [str(action) for action in pipeline.actions(2)[1]] == ["F0", "BW0", "F1", "B1", "W1"]
    assert pipeline.file.lines == (3, 4) and pipeline.warnings(2) == []
    with pytest.raises(ScheduleError, match="runs 2 microbatches, the run has 3 .*; 2 would work"):
        pipeline.actions(3)
    report = dry_run_report(config, config.grid)
    assert "schedule mine.txt: 2 ranks, 2 microbatches" in report


def test_a_file_says_where_its_chunks_lie(tmp_path):
    config, problems = config_with(tmp_path, V, "--num-virtual-stages-per-pipeline-rank 2 --decoder-first-pipeline-num-layers 1")
    assert problems == []
    assert [chunk.layers for chunk in pipeline_of(config).chunks(0)] == [range(0, 1), range(3, 4)]
    assert "mine.txt: 2 ranks x 2 chunks" in dry_run_report(config, config.grid)


REFUSED = {  # text, flags, what the one line says
    "deadlock": ("F0 BW0 F1 BW1\nF0 F1 BW0 BW1", "",
                 "mine.txt, line 1: deadlock: rank 0, action 1 (BW0) waits for B0 of rank 1; rank 1, action 1 (F1)"),
    "missing": ("F0 F1 BW0 BW1\n# rank 1\nF0 BW0 F1 B1", "", "mine.txt, line 3: rank 1 never runs W1 (nor BW1): a weight"),
    "twice": ("F0 F1 BW0 BW1\nF0 BW0 F1 BW1 F1", "", "mine.txt, line 2: rank 1, action 4 (F1): F1 of rank 1 runs a second time"),
    "order on a rank": ("F0 F1 BW0 BW1\nF0 F1 W0 B0 BW1", "", "line 2: rank 1, action 2 (W0): comes before B0 of rank 1"),
    "order on a link": ("F0 F1 BW0 BW1\nF0 F1 BW1 BW0", "",
                        "line 1: rank 1 -> rank 0, gradient 0: sent is the result of B1, expected that of B0"),
    "ranks": ("F0 F1 BW0 BW1", "", "holds the lists of 1 ranks, --pipeline-model-parallel-size is 2; 1 would work"),
    "too many microbatches": (GOOD.replace("F1 B0", "F1 F2 B0"), "",
                              "runs 3 microbatches, the run has 2 microbatches per step"),
    "their first": (GOOD.replace("F1 B0", "F1 F2 B0"), "", "3 would work (line 1, action 2: F2)"),
    "too few microbatches": (GOOD, "--global-batch-size 8", "runs 2 microbatches, the run has 4"),
    "no action": ("F0 F1 X0\nF0", "", "mine.txt, line 1 (rank 0): 'X0' is no action"),
    "wrong label": ("r1: F0\nr0: F0", "", "mine.txt, line 1 is labelled rank 1, but rank 0 comes next"),
    "placement": ("placement w\nF0", "", "mine.txt, line 1: 'placement w': choose placement loop, v, bidirectional"),
    "no list": ("r0:\nr1: F0", "", "mine.txt, line 1: rank 0 has no actions"),
    "empty": ("# nothing\n", "", "mine.txt holds no actions"),
    "not there": (None, "", "mine.txt cannot be read: No such file or directory"),
    "chunks of a v": ("placement v\n" + GOOD, "", "a v placement folds the pipeline once: it has 2 chunks per rank, not 1"),
    "chunks of the flags": (GOOD, "--num-virtual-stages-per-pipeline-rank 2",
                            "mine.txt has 1 chunks per rank, not 2; nearest values that work: --num-virtual-stages-per"),
    "layers": (V, "--num-layers 3", "3 layers cannot fill 4 stages, each needs one; nearest values that work: --num-layers 4"),
    "odd halves": ("placement bidirectional\nF0.0 F1.0 BW0.0 BW1.0 F2.1 BW2.1\nF2.1 F0.0 BW0.0 BW2.1 F1.0 BW1.0",
                   "--global-batch-size 6", "two directions share them evenly; 4 would work"),
    "a name too": (GOOD, "--pipeline-schedule gpipe", "contradict each other: both say what each pipeline rank runs"),
    "groups": (GOOD, "--microbatch-group-size-per-virtual-pipeline-stage 2", "runs no groups"),
    "no pipeline": (GOOD, "--pipeline-model-parallel-size 1", "has no effect: needs --pipeline-model-parallel-size above 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_refused_before_launch(tmp_path, name):
    text, flags, says = REFUSED[name]
    _, problems = config_with(tmp_path, text, flags)
    assert len(problems) == 1, [str(problem) for problem in problems]
    line = str(problems[0])
    assert says in line and ("--pipeline-schedule-file" in line or name == "groups") and "\n" not in line, line


def test_what_is_no_text_is_refused(tmp_path):
    path = Path(tmp_path / "mine.txt")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScheduleError, match="is no text file"):
        read_schedule(str(path))
