"""The log line, what it is made of, and the sinks: JSONL, TensorBoard and W&B (the real package, offline)."""

import dataclasses
import json
import math
import re
import sys
import time
from datetime import datetime

import pytest
import torch

from megatron_lite.comm.mesh import build_mesh, single
from megatron_lite.config import CheckpointConfig, Config, DataConfig, LoggingConfig, ModelConfig, ParallelConfig, TrainConfig
from megatron_lite.grid import Grid
from megatron_lite.pipeline.executor import Result
from megatron_lite.planner.flops import flops_per_iteration
from megatron_lite.training import logging as log
from megatron_lite.training.peak import matmul_peak_tflops, measured_tflops
from megatron_lite.training.step import StepReport
from megatron_lite.training.tracking import without_secrets

CONFIG = Config(
    model=ModelConfig(num_layers=2, hidden_size=64, ffn_hidden_size=128, num_attention_heads=4, kv_channels=16, seq_length=32,
                      max_position_embeddings=32),
    data=DataConfig(vocab_size=257),
    train=TrainConfig(micro_batch_size=2, global_batch_size=8, train_iters=1000, world_size=1),
    logging=LoggingConfig(peak_tflops=0.01),
)  # fmt: skip

# Megatron's line, then ours; the groups are what parsers take out of it.
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\] iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \|"
    r" elapsed time per iteration \(ms\): ([\d.]+) \| throughput per GPU \(TFLOP/s/GPU\): ([\d.]+) \|"
    r" learning rate: ([\d.E+-]+) \| global batch size: +(\d+) \| lm loss: ([\d.E+-]+|NAN) \| loss scale: ([\d.]+) \|"
    r" grad norm: ([\d.]+|nan|inf) \|( params norm: [\d.]+ \|)? number of skipped iterations: +(\d+) \|"
    r" number of nan iterations: +(\d+) \| tokens/s: (\d+) \| tokens/s/device: (\d+) \|"
    r" MFU \(model FLOPs, causal half\): ([\d.]+)% \|( bubble: [\d.]+% \|)? data wait: ([\d.]+)% \|"
    r" peak memory \(GB\): ([\d.]+) \| consumed tokens: (\d+) \| ETA: (\d+:\d\d:\d\d) \|"
)


def step(loss=2.0, norm=1.5, stepped=True, total=1.0, wait=0.0, scale=1.0, search=False):
    """`search`: the step was skipped for a loss scale that can still fall."""
    zero = torch.zeros((), dtype=torch.float64)
    fault = None if stepped or search else "somewhere"
    result = Result(zero, zero, ended=total, waits=[(None, 0.0, wait)])
    return StepReport(loss, 256, norm, 3e-4, stepped, result, scale, fault)


def config_with(**logging) -> Config:
    return dataclasses.replace(CONFIG, logging=dataclasses.replace(CONFIG.logging, **logging))


def some_metrics(**changes) -> log.Metrics:
    interval = log.Interval(CONFIG, single())
    interval.add(step(2.0), 0.5)
    return dataclasses.replace(interval.metrics(1, 8), **changes)


def test_line_is_megatrons_then_ours():
    metrics = some_metrics(
        iteration=100, consumed_samples=800, seconds_per_iteration=1.23456, lm_loss=2.5, tflops_per_device=123.456, mfu=41.26,
        peak_memory_bytes=1_500_000_000, consumed_tokens=25600, eta_seconds=3725.0, tokens_per_second=1000.4,
        tokens_per_second_per_device=250.1, grad_norm=1.2345)  # fmt: skip
    line = log.log_line(metrics, datetime(2026, 1, 2, 3, 4, 5, 678))
    assert line == (
        " [2026-01-02 03:04:05.000678] iteration      100/    1000 | consumed samples:          800 |"
        " elapsed time per iteration (ms): 1234.6 | throughput per GPU (TFLOP/s/GPU): 123.5 |"
        " learning rate: 3.000000E-04 | global batch size:     8 | lm loss: 2.500000E+00 | loss scale: 1.0 |"
        " grad norm: 1.234 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        " tokens/s: 1000 | tokens/s/device: 250 | MFU (model FLOPs, causal half): 41.3% | data wait: 0.0% |"
        " peak memory (GB): 1.50 | consumed tokens: 25600 | ETA: 1:02:05 |"
    )
    assert LINE.fullmatch(line)


def test_optional_fields_stand_in_megatrons_places():
    assert LINE.fullmatch(log.log_line(some_metrics(params_norm=7.0, bubble_percent=12.5)))
    bare = log.log_line(some_metrics(tflops_per_device=None, mfu=None))
    assert "throughput" not in bare and "MFU" not in bare


def test_interval_counts_and_starts_afresh():
    interval = log.Interval(CONFIG, single())
    for loss in (4.0, 2.0):
        interval.add(step(loss), 0.25, data_wait_seconds=0.05)
    first = interval.metrics(2, 16, params_norm=3.0)
    assert (first.lm_loss, first.skipped, first.nan_iterations, first.params_norm) == (3.0, 0, 0, 3.0)
    assert first.seconds_per_iteration == pytest.approx(0.25) and first.data_wait_percent == pytest.approx(20.0)
    assert first.tokens_per_second == first.tokens_per_second_per_device == pytest.approx(8 * 32 / 0.25)
    assert first.tflops_per_device == pytest.approx(flops_per_iteration(CONFIG) / 0.25e12)
    assert first.mfu == pytest.approx(100 * first.tflops_per_device / 0.01)
    assert first.consumed_tokens == 16 * 32 and first.eta_seconds == pytest.approx(998 * 0.25)
    assert first.bubble_percent is None and first.peak_memory_bytes > 10_000_000
    interval.add(step(1.0), 1.0)
    second = interval.metrics(3, 24)
    assert (second.lm_loss, second.seconds_per_iteration, second.data_wait_percent) == (1.0, 1.0, 0.0)


def test_skipped_and_nan_steps_are_counted_and_stay_out_of_the_loss():
    interval = log.Interval(CONFIG, single())
    interval.add(step(2.0), 1.0)
    interval.add(step(5.0, math.inf, stepped=False), 1.0)  # the gradient alone overflowed
    interval.add(step(math.nan, math.nan, stepped=False), 1.0)
    assert interval.skipped_in_a_row == 2
    metrics = interval.metrics(3, 24)
    assert (metrics.lm_loss, metrics.skipped, metrics.nan_iterations) == (2.0, 2, 1)

    interval.add(step(math.nan, math.nan, stepped=False), 1.0)
    assert interval.skipped_in_a_row == 3  # lives on over the lines
    metrics = interval.metrics(4, 32)
    assert math.isnan(metrics.lm_loss) and (metrics.skipped, metrics.nan_iterations) == (1, 1)
    found = LINE.fullmatch(log.log_line(metrics))
    assert found[8] == "NAN" and found[12] == "1" and found[13] == "1"
    interval.add(step(2.0), 1.0)
    assert interval.skipped_in_a_row == 0


def test_a_search_for_the_loss_scale_is_counted_but_is_no_failure():
    interval = log.Interval(CONFIG, single())
    interval.add(step(3.0, math.inf, stepped=False, scale=65536.0, search=True), 1.0)
    assert interval.skipped_in_a_row == 0
    metrics = interval.metrics(1, 8)
    assert (metrics.skipped, metrics.nan_iterations, metrics.loss_scale) == (1, 0, 65536.0) and math.isnan(metrics.lm_loss)
    assert LINE.fullmatch(log.log_line(metrics))[9] == "65536.0" and log.values_of(metrics)["loss-scale"] == 65536.0


def two_stages(rank, mesh_config):
    interval = log.Interval(mesh_config, build_mesh(Grid(pp=2), torch.device("cpu")))
    interval.add(step(total=0.8, wait=0.2 * (rank + 1)), 1.0, data_wait_seconds=0.1 * rank)
    interval.add(step(total=[1.2, 0.8][rank], wait=0.1), 1.0, data_wait_seconds=0.1 * rank)
    return interval.metrics(2, 16)


def test_waits_are_the_ranks_mean_and_the_line_is_the_same_everywhere(pool):
    config = dataclasses.replace(CONFIG, parallel=ParallelConfig(pipeline_model_parallel_size=2),
                                 train=dataclasses.replace(CONFIG.train, world_size=2))  # fmt: skip
    first, last = pool.run(two_stages, 2, config)
    assert first == last
    # Step 1: 0.2 and 0.4 of 0.8 s idle; step 2: 0.1 and, with the wait for the slower rank, 0.5 of 1.2 s.
    assert first.bubble_percent == pytest.approx(100 * (0.3 + 0.3) / (0.8 + 1.2))
    assert first.data_wait_percent == pytest.approx(5.0)
    assert first.tokens_per_second == pytest.approx(2 * first.tokens_per_second_per_device)


@pytest.mark.parametrize("seconds,text", [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (273_600, "3d 4:00:00")])
def test_duration(seconds, text):
    assert log.duration(seconds) == text


def test_evaluation_stands_between_rulers():
    ruler, line, end = log.evaluation_lines(100, 2.0).split("\n")
    assert line == " validation loss at iteration 100 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
    assert ruler == end == "-" * (len(line) + 1)
    assert "lm loss PPL: 4.851652E+08" in log.evaluation_lines(1, 1e3)  # exp(20), Megatron's ceiling
    assert " at iteration 7 on test set | " in log.evaluation_lines(7, 1.0, " on test set")
    assert math.isnan(log.perplexity(math.nan))


def test_jsonl_appends_across_runs_and_torn_lines(tmp_path):
    path = tmp_path / "new" / "log.jsonl"
    config = config_with(jsonl=str(path))
    sinks = log.build_sinks(config, True)
    sinks.write_metrics(some_metrics())
    sinks.write_evaluation(1, 8, 2.0)
    sinks.close()
    with open(path, "a") as file:
        file.write('{"iteration": 2, "lm lo')  # killed here
    sinks = log.build_sinks(config, True, iteration=1)
    sinks.write_metrics(some_metrics(iteration=2, lm_loss=math.nan))
    sinks.close()
    lines = path.read_text().splitlines()
    start, train, evaluation, again, last = (json.loads(lines[i]) for i in (0, 1, 2, 4, 5))
    assert len(lines) == 6
    assert start["event"] == again["event"] == "start" and again["iteration"] == 1
    assert start["settings"]["model"]["hidden_size"] == 64 and "wandb_project" in start["settings"]["logging"]
    assert train["iteration"] == 1 and train["lm loss"] == 2.0 and train["learning-rate"] == 3e-4
    assert {"batch-size", "loss-scale", "grad-norm", "iteration-time", "throughput", "consumed-tokens"} <= set(train)
    assert evaluation["lm loss validation"] == 2.0 and evaluation["lm loss validation ppl"] == pytest.approx(math.exp(2))
    assert last["iteration"] == 2 and last["lm loss"] is None  # NaN is not JSON


def test_tensorboard_events_read_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sinks = log.build_sinks(config_with(tensorboard_dir=str(tmp_path)), True)
    for iteration in (1, 2):
        sinks.write_metrics(some_metrics(iteration=iteration, consumed_samples=8 * iteration, lm_loss=3.0 / iteration))
    sinks.write_evaluation(2, 16, 1.25)
    sinks.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("lm loss")] == [(1, 3.0), (2, 1.5)]
    assert [e.step for e in events.Scalars("lm loss vs samples")] == [8, 16]
    assert [(e.step, e.value) for e in events.Scalars("lm loss validation")] == [(2, 1.25)]
    assert {"learning-rate", "batch-size", "loss-scale", "grad-norm", "throughput"} <= set(events.Tags()["scalars"])


@pytest.fixture
def wandb_offline(tmp_path, monkeypatch):
    """(folder, list of the keywords of each wandb.init)"""
    wandb = pytest.importorskip("wandb")
    inits = []
    real = wandb.init

    def counted(**options):
        inits.append(options)
        return real(**options)

    monkeypatch.setattr(wandb, "init", counted)
    for key, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_API_KEY": "0123456789abcdef" * 2 + "deadbeef",
                       "WANDB_CACHE_DIR": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path)}.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    wandb.teardown()  # a session that another test began would not see these variables
    yield tmp_path, inits
    wandb.teardown()


def wandb_records(folder):
    """The records of a run's .wandb file, once its last one is there: 7 bytes of header, then a log in blocks of 32 KiB of
    (checksum, length, kind) and data, as LevelDB's; kinds 1 full, 2 first, 3 middle, 4 last."""
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + 20  # W&B's own process writes the file, a moment after finish() has returned
    while True:
        records, part, at = [], b"", 7
        data = b"".join(path.read_bytes() for path in folder.glob("*.wandb"))
        while at + 7 <= len(data):
            if at % 32768 > 32768 - 7:
                at += -at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            part = data[at + 7 : at + 7 + length] if kind in (1, 2) else part + data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):
                records.append(Record.FromString(part))
        if any(record.WhichOneof("record_type") == "exit" for record in records) or time.monotonic() > deadline:
            return records
        time.sleep(0.05)


def test_settings_named_like_secrets_stay_here():
    given = {"model": {"hidden_size": 64}, "hub_token": "x", "a": {"api_key": "y", "password": "z"}, "eod_token_id": 3}
    assert without_secrets(given) == {"model": {"hidden_size": 64}, "a": {}, "eod_token_id": 3}


def test_wandb_offline_with_the_real_package(wandb_offline, monkeypatch):
    folder, inits = wandb_offline
    monkeypatch.setenv("SOME_TOKEN", "s3cr3t-value")
    config = dataclasses.replace(
        config_with(wandb_project="lite", wandb_exp_name="run-1", wandb_group="g", wandb_tags=("a", "b")),
        checkpoint=CheckpointConfig(save=str(folder / "save")),
        data=dataclasses.replace(CONFIG.data, data_path=("https://me:s3cr3t-value@host/corpus",)))  # fmt: skip
    others = log.build_sinks(config, False)
    sinks = log.build_sinks(config, True)
    sinks.write_metrics(some_metrics())
    sinks.write_evaluation(1, 8, 2.0)
    sinks.event(1, "warning", "the gradient is NaN")
    sinks.event(1, "stop", "no alert")
    run_id = sinks.wandb_id
    assert others.wandb_id is None and run_id
    sinks.close()

    (run,) = (folder / "save" / "wandb").glob("offline-run-*")
    records = wandb_records(run)
    written = b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())
    assert run.name.endswith(run_id)
    assert b"deadbeef" not in written and b"s3cr3t-value" not in written
    (made,) = (record.run for record in records if record.WhichOneof("record_type") == "run")
    assert (made.run_id, made.display_name, made.run_group, list(made.tags)) == (run_id, "run-1", "g", ["a", "b"])
    settings = {item.key: json.loads(item.value_json) for item in made.config.update}
    assert settings["model"]["hidden_size"] == 64 and settings["data"]["data_path"] == ["https://me:***@host/corpus"]
    rows = [{(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item}
            for record in records if record.WhichOneof("record_type") == "history"]  # fmt: skip
    assert rows[0]["iteration"] == 1 and set(log.values_of(some_metrics())) <= set(rows[0])  # as in JSONL and TensorBoard
    assert rows[1]["lm loss validation"] == 2.0 and {"consumed-tokens", "iteration"} <= set(rows[1])
    steps = {record.metric.step_metric for record in records if record.WhichOneof("record_type") == "metric"}
    assert steps == {"", "iteration"}
    (alert,) = (record.alert for record in records if record.WhichOneof("record_type") == "alert")
    assert alert.title == "run-1: warning" and alert.text == "iteration 1: the gradient is NaN"
    assert len(inits) == 1 and inits[0]["config"]["model"]["hidden_size"] == 64
    assert inits[0]["config"]["data"]["data_path"] == ["https://me:***@host/corpus"]

    resumed = log.build_sinks(config, True, run_id)  # as the next process does, with the id from the checkpoint
    assert resumed.wandb_id == run_id
    resumed.close()
    assert (inits[1]["id"], inits[1]["resume"]) == (run_id, "allow")


def test_wandb_without_key_or_network_goes_on_offline(wandb_offline, monkeypatch, capsys):
    import wandb

    folder, inits = wandb_offline
    offline = wandb.init

    def refused(**options):
        if options.get("mode") != "offline":
            raise wandb.errors.UsageError("No API key configured. Use `wandb login` to log in.\nmore")
        return offline(**options)

    monkeypatch.setattr(wandb, "init", refused)
    sinks = log.build_sinks(config_with(wandb_project="lite", wandb_save_dir=str(folder)), True)
    sinks.close()
    assert "No API key configured" in capsys.readouterr().err
    assert list((folder / "wandb").glob("offline-run-*"))


def test_missing_package_is_one_line_before_anything_is_built(monkeypatch, tmp_path):
    config = config_with(wandb_project="lite", tensorboard_dir="tb")
    log.check_sinks(config)
    monkeypatch.setattr(log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(log.LoggingError, match="pip install wandb.*pip install tensorboard") as error:
        log.check_sinks(config)
    assert "\n" not in str(error.value)
    log.check_sinks(config_with(jsonl="log.jsonl"))
    monkeypatch.undo()

    (tmp_path / "looks_like_a_package").mkdir()  # W&B leaves a folder `wandb` where it runs
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not log.installed("looks_like_a_package") and log.installed("torch")


def test_other_ranks_have_no_sinks_and_import_nothing(monkeypatch):
    for package in ("wandb", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)  # an import would fail
    sinks = log.build_sinks(config_with(wandb_project="lite", tensorboard_dir="tb", jsonl="/nowhere/log"), False)
    sinks.write_metrics(some_metrics())
    sinks.close()
    assert sinks.sinks == [] and sinks.wandb_id is None


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(log.LoggingError, match="--jsonl .*file/log.jsonl: "):
        log.build_sinks(config_with(jsonl=str(tmp_path / "file" / "log.jsonl")), True)


def test_a_sink_that_fails_does_not_end_the_run(capsys):
    sinks = log.build_sinks(config_with(jsonl="/dev/full"), True)
    sinks.write_metrics(some_metrics(iteration=5))
    assert "JSONLSink stops at iteration 5" in capsys.readouterr().err and sinks.sinks == []


def test_matmul_peak():
    cpu = torch.device("cpu")
    assert matmul_peak_tflops(torch.float32, cpu, override=12.5) == 12.5
    assert 1e-3 < measured_tflops(torch.float32) < 1e3
    assert matmul_peak_tflops(torch.float32, torch.device("meta")) is None
