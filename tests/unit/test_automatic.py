"""The choice of a pipeline from costs: what a model's parts cost, how its layers are cut, what is chosen, refused, kept."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.arguments import parse
from megatron_lite.config import Config, ModelConfig, ParallelConfig
from megatron_lite.planner.automatic import (
    PartCosts,
    Price,
    balanced_layers,
    choose_pipeline,
    decisive,
    flop_costs,
    from_record,
    stage_costs,
    to_record,
)
from megatron_lite.planner.flops import flops_per_token
from megatron_lite.planner.pipeline import pipeline_of
from megatron_lite.planner.report import dry_run_report
from megatron_lite.schedules.actions import Placement
from megatron_lite.schedules.check import check
from megatron_lite.schedules.simulate import Costs, simulate

FREE = (0, 0, 0)
GPT = "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 250 --lr 1e-3 --mock-data"
RUN = f"{GPT} --micro-batch-size 1 --global-batch-size 8 --train-iters 4 --pipeline-model-parallel-size"
price = st.tuples(*[st.integers(0, 9)] * 3)
layer_price = st.tuples(*[st.integers(1, 9)] * 3)


def costs(pp, layer=(1, 1, 1), head=FREE, embedding=FREE, latency=0):
    return PartCosts((Price(*layer),) * pp, (Price(*embedding),) * pp, (Price(*head),) * pp, latency, "units", "given")


def automatic(layers, pp, **flags):
    parallel = ParallelConfig(**{"pipeline_model_parallel_size": pp, "pipeline_schedule": "auto", **flags})
    return Config(model=ModelConfig(num_layers=layers), parallel=parallel)


CHOICES = {  # name -> (ranks, costs, limit, flags, what must be chosen: schedule, chunks, layers per stage)
    "even costs": (2, {}, None, {}, ("zbv", 2, [2, 2, 2, 2])),
    "even costs, four ranks": (4, {}, 4, {}, ("zbv", 2, [1] * 8)),
    "one chunk": (4, {}, 4, {"num_virtual_stages_per_pipeline_rank": 1}, ("zb-h1", 1, [2, 2, 2, 2])),
    "no weight gradients to move": (2, {"layer": (1, 2, 0)}, None, {}, ("interleaved", 4, [1] * 8)),
    "the same, one chunk, little memory": (
        4, {"layer": (1, 2, 0)}, 4, {"num_virtual_stages_per_pipeline_rank": 1}, ("1f1b", 1, [2, 2, 2, 2])),
    "four chunks": (2, {}, None, {"num_virtual_stages_per_pipeline_rank": 4}, ("interleaved", 4, [1] * 8)),
    "layers per chunk": (2, {}, None, {"num_layers_per_virtual_pipeline_stage": 1}, ("interleaved", 4, [1] * 8)),
    "slow output layer": (2, {"head": (3, 3, 3)}, 2.5, {}, ("greedy", 2, [2, 3, 2, 1])),
    "slow output layer, fixed ends": (
        2, {"head": (3, 3, 3)}, 2, {"decoder_last_pipeline_num_layers": 1, "num_virtual_stages_per_pipeline_rank": 1},
        ("zb-h1", 1, [7, 1])),
    "slow wires": (4, {"latency": 6}, 4, {}, ("greedy", 1, [2, 2, 2, 2])),
    "memory of one microbatch": (2, {}, 1, {}, ("greedy", 2, [2, 2, 2, 2])),
    "only the split": (
        2, {"head": (3, 3, 3)}, None, {"pipeline_schedule": "1f1b", "pipeline_split": "auto"}, ("1f1b", 1, [6, 2])),
    "only the split, in a v": (
        2, {"head": (2, 2, 2)}, None, {"pipeline_schedule": "zbv", "pipeline_split": "auto"}, ("zbv", 2, [2, 3, 2, 1])),
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_what_is_chosen(name):
    pp, given_costs, limit, flags, expected = CHOICES[name]
    chosen = choose_pipeline(automatic(8, pp, pipeline_memory_limit=limit, **flags), 8, costs(pp, **given_costs))
    pipeline = chosen.pipeline
    assert (pipeline.schedule, pipeline.num_chunks, [len(own) for own in pipeline.layers]) == expected
    report = check(pipeline.actions(8), pipeline.placement, 8)
    assert limit is None or max(report.peak_live) <= limit
    assert chosen.report.startswith(f"pipeline chosen: {pipeline.schedule} with ") and "given; F B W in units" in chosen.report


def test_the_list_scheduler_beats_every_named_schedule_that_fits():
    """Under this limit a slow output layer leaves every named schedule behind."""
    made = costs(2, head=(3, 3, 3))
    report = choose_pipeline(automatic(8, 2, pipeline_memory_limit=2.5), 8, made).report.splitlines()[2:-1]
    rows = [row for row in report if "over the limit" not in row]
    assert rows[0].split()[0] == "greedy" and rows[0].endswith("<- chosen")
    named = [float(row.split()[2]) for row in rows if not row.strip().startswith("greedy")]
    assert len(named) >= 5 and min(named) > float(rows[0].split()[2])


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.integers(1, 8), st.integers(0, 6), st.one_of(st.none(), st.integers(2, 12)), st.data())
def test_any_choice_is_valid_within_the_limit_and_not_longer_than_1f1b(pp, m, more, half_limit, data):
    """Whatever each rank's parts cost."""
    layers, limit = pp + more, half_limit and half_limit / 2
    parts = [tuple(Price(*data.draw(kind)) for _ in range(pp)) for kind in (layer_price, price, price)]
    made = PartCosts(*parts, data.draw(st.integers(0, 3)), "units", "given")
    chosen = choose_pipeline(automatic(layers, pp, pipeline_memory_limit=limit), m, made)
    pipeline = chosen.pipeline
    assert [layer for own in pipeline.layers for layer in own] == list(range(layers))
    assert all(pipeline.layers)
    report = check(pipeline.actions(m), pipeline.placement, m)
    assert limit is None or max(report.peak_live) <= limit
    step = simulate(pipeline.actions(m), pipeline.placement, chosen.costs).makespan
    usual = pipeline_of(Config(model=ModelConfig(num_layers=layers), parallel=ParallelConfig(pipeline_model_parallel_size=pp)))
    other = simulate(usual.actions(m), usual.placement, stage_costs(made, usual.placement, usual.layers))
    assert step <= other.makespan + 1e-6 or max(other.peak_live) > (limit or m)
    assert choose_pipeline(automatic(layers, pp, pipeline_memory_limit=limit), m, made).pipeline == pipeline


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([("loop", 1), ("loop", 2), ("v", 2)]), st.integers(1, 3), st.integers(0, 6), st.data())
def test_the_balanced_split_is_the_best_of_all(kind, pp, more, data):
    """No other split has a busiest rank with less to do."""
    placement = Placement(kind[0], pp, kind[1])
    stages, layers = placement.num_stages, placement.num_stages + more
    parts = [tuple(Price(*data.draw(each)) for _ in range(pp)) for each in (layer_price, price, price)]
    made = PartCosts(*parts, 0, "units", "given")

    def busiest(ranges):
        of = stage_costs(made, placement, ranges)
        totals = [sum(costs) for costs in zip(of.forward, of.input_grad, of.weight_grad, strict=True)]
        return max(sum(totals[s] for s in range(stages) if placement.where(s).rank == rank) for rank in range(pp))

    bounds = [(0, *inner, layers) for inner in combinations(range(1, layers), stages - 1)]
    best = min(busiest([range(a, b) for a, b in zip(bound, bound[1:], strict=False)]) for bound in bounds)
    assert busiest(balanced_layers(layers, placement, made)) == best


def test_costs_of_stages():
    """Rank 1 is twice as slow; the first stage has the embedding, the last the output layer."""
    made = PartCosts((Price(1, 2, 3), Price(2, 4, 6)), (Price(0, 0, 5), Price(0, 0, 9)), (Price(7, 7, 7), Price(8, 8, 8)),
                     4, "units", "given")  # fmt: skip
    layers = [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    loop = stage_costs(made, Placement("loop", 2, 2), layers)
    assert loop == Costs([2, 2, 1, 10], [4, 4, 2, 12], [11, 6, 3, 14], 4)
    assert stage_costs(made, Placement("v", 2, 2), layers) == Costs([2, 2, 2, 8], [4, 4, 4, 9], [11, 6, 6, 10], 4)


@pytest.mark.parametrize("more", ["", "--swiglu --group-query-attention --num-query-groups 2 --kv-channels 16"])
def test_flop_costs_add_up_to_the_flops_of_a_token(more):
    config, problems = parse(f"{RUN} 2 {more}".split(), 2)
    assert not problems
    found, model = flop_costs(config), config.model
    h, q, kv = model.hidden_size, model.num_attention_heads * model.head_dim, model.num_kv_heads * model.head_dim
    unit = 2 * ((3 if model.swiglu else 2) * h * model.ffn_hidden_size + h * (q + 2 * kv) + q * h) + 2 * q * model.seq_length
    total = unit * (model.num_layers * found.layer[0].total + found.head[0].total + found.embedding[0].total)
    assert total == pytest.approx(flops_per_token(config), rel=1e-12)
    assert found.layer[0].weight_grad < found.layer[0].forward < found.layer[0].input_grad  # attention's core has no weights


@pytest.mark.parametrize("flags", ["--pipeline-schedule auto", "--pipeline-schedule auto --pipeline-memory-limit 2.5",
                                   "--pipeline-split auto --vocab-size 4000"])  # fmt: skip
def test_a_dry_run_says_what_would_be_chosen_and_by_what(flags):
    config, problems = parse(f"{RUN} 2 --dry-run --world-size 2 {flags}".split(), 1)
    assert not problems
    report = dry_run_report(config, config.grid)
    assert "pipeline chosen: " in report and "costs counted in FLOPs, not measured" in report and "schedule" in report
    said = next(part for part in report.split("\n\n") if part.startswith("pipeline chosen: "))
    assert max(map(len, said.splitlines())) <= 100


REFUSED = {  # flags -> what the message says
    "2 --pipeline-schedule auto --pipeline-memory-limit 0.5":
        "the least that any does is 1 microbatch per rank; nearest value that works: --pipeline-memory-limit 1",
    "2 --pipeline-schedule auto --num-virtual-stages-per-pipeline-rank 4 --pipeline-memory-limit 2":
        "the least that any does is 2.25 microbatches per rank; nearest value that works: --pipeline-memory-limit 2.25",
    "2 --pipeline-schedule auto --pipeline-memory-limit 0": "must be above 0",
    "2 --pipeline-memory-limit 2": "needs --pipeline-schedule auto",
    "2 --pipeline-schedule auto --pipeline-split auto": "tries both splits",
    "2 --pipeline-schedule auto --microbatch-group-size-per-virtual-pipeline-stage 4": "smallest groups that waste nothing",
    "2 --pipeline-split auto --decoder-first-pipeline-num-layers 3": "contradict each other",
    "1 --pipeline-schedule auto": "needs --pipeline-model-parallel-size above 1",
    "1 --pipeline-split auto": "needs --pipeline-model-parallel-size above 1",
    "1 --pipeline-memory-limit 2": "needs --pipeline-model-parallel-size above 1",
    "4 --pipeline-schedule auto --num-virtual-stages-per-pipeline-rank 3": "8 layers cannot fill 12 stages",
    "16 --pipeline-schedule auto": "8 layers cannot fill 16 stages",
    "4 --pipeline-schedule auto --num-layers 12 --num-virtual-stages-per-pipeline-rank 3 --global-batch-size 2":
        "no schedule runs 3 chunks per rank and 2 microbatches per step",
}  # fmt: skip


@pytest.mark.parametrize("flags", REFUSED)
def test_what_cannot_be_is_refused_before_launch(flags):
    _, problems = parse(f"{RUN} {flags}".split(), int(flags.split()[0]))
    assert len(problems) == 1 and REFUSED[flags] in str(problems[0]), problems


def test_flags_alone_do_not_give_an_automatic_pipeline():
    with pytest.raises(ValueError, match="chosen from costs"):
        pipeline_of(automatic(8, 2))


def test_a_record_gives_back_the_pipeline_for_the_same_settings_alone():
    config, problems = parse(f"{RUN} 2 --pipeline-schedule auto --pipeline-memory-limit 2.5".split(), 2)
    assert not problems
    sizes = decisive(config, 8)
    for head in (FREE, (3, 3, 3)):  # a named schedule, and lists
        pipeline = choose_pipeline(config, 8, costs(2, head=head)).pipeline
        assert from_record(to_record(pipeline, sizes), sizes) == pipeline
        assert from_record(to_record(pipeline, sizes), decisive(config, 4)) is None
    assert from_record(None, sizes) is None
    other, _ = parse(f"{RUN} 2 --pipeline-schedule auto --pipeline-memory-limit 3".split(), 2)
    assert from_record(to_record(pipeline, sizes), decisive(other, 8)) is None


def test_lists_are_for_one_number_of_microbatches():
    pipeline = choose_pipeline(automatic(8, 2, pipeline_memory_limit=1), 8, costs(2)).pipeline
    assert pipeline.problems(8) == [] and pipeline.problems(6) == ["the greedy lists are for 8 microbatches, not 6"]
    with pytest.raises(ValueError, match="for 8 microbatches, not 6"):
        pipeline.actions(6)
