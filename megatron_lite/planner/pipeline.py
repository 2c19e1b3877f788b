"""What the flags make of the pipeline: schedule, chunks, where the stages lie and which layers each holds.

    --pipeline-schedule        1f1b      interleaved   zbv, dualpipev      the others
    chunks per rank            1         2             2                   1
    or as given                any: with 2 or more it is interleaved       no other number runs

Stages are numbered over the whole pipeline, 0 takes tokens and the last makes the loss; the split of the layers and the
flags for its ends are about these stages. Which rank and chunk a stage is, `Placement` says:

    8 layers, pp 2, 1f1b with 2 chunks     rank 0: layers 0..1, 4..5    rank 1: 2..3, 6..7     (loop)
    8 layers, pp 2, zbv                    rank 0: layers 0..1, 6..7    rank 1: 2..3, 4..5     (v)

Worked out here alone: what is built, planned, validated and reported all comes from `plan_pipeline`. With
`--pipeline-schedule auto` or `--pipeline-split auto` the flags alone do not say: planner/automatic.py chooses, from costs.
"""

from typing import NamedTuple

from megatron_lite.config import Config, ParallelConfig
from megatron_lite.planner.split import layer_ranges
from megatron_lite.schedules import SCHEDULES, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.advice import schedule_warnings

AUTO = "auto"
MOST_CHUNKS = 256  # per rank: so many a pipeline message can tell apart (comm/p2p.py)


class Chunk(NamedTuple):
    """One chunk of one rank: its stage and that stage's layers; `first` takes tokens, `last` makes the loss."""

    stage: int
    layers: range
    first: bool
    last: bool


class Pipeline(NamedTuple):
    """A pipeline without its number of microbatches, which the lists of actions need."""

    schedule: str  # one of SCHEDULES, interleaved where the flags say 1f1b and several chunks; or a name for `lists`
    placement: Placement
    group_size: int | None  # microbatches per group of an interleaved schedule, None: as many as ranks
    layers: tuple[range, ...]  # of every stage
    lists: tuple[tuple[Action, ...], ...] | None = None  # the actions of all ranks, where no named schedule makes them

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    def chunks(self, rank: int) -> list[Chunk]:
        """What a pipeline rank holds, in chunk order."""
        stages = [self.placement.stage(rank, chunk) for chunk in range(self.num_chunks)]
        return [Chunk(s, self.layers[s], s == 0, s == len(self.layers) - 1) for s in stages]

    def actions(self, num_microbatches: int) -> list[list[Action]]:
        """The action lists of all ranks; ScheduleError where there are none."""
        if self.lists is not None:
            if problems := self.problems(num_microbatches):
                raise ScheduleError("\n".join(problems))
            return [list(actions) for actions in self.lists]
        return build_schedule(self.schedule, *self._sizes(num_microbatches))

    def problems(self, num_microbatches: int) -> list[str]:
        """Why there are no lists for so many microbatches, in words with what would work; empty where there are."""
        if self.lists is not None:
            made_for = sum(action.kind == "F" and action.chunk == 0 for action in self.lists[0])
            wrong = made_for != num_microbatches
            return [f"the {self.schedule} lists are for {made_for} microbatches, not {num_microbatches}"] if wrong else []
        return schedule_problems(self.schedule, *self._sizes(num_microbatches))

    def warnings(self, num_microbatches: int) -> list[str]:
        """What runs but wastes time or memory."""
        if self.lists is not None:
            return []
        return schedule_warnings(self.schedule, *self._sizes(num_microbatches))

    def _sizes(self, num_microbatches: int) -> tuple[int, int, int, int | None]:
        return self.placement.pp_size, self.num_chunks, num_microbatches, self.group_size


def plan_pipeline(num_layers: int, parallel: ParallelConfig) -> Pipeline:
    """The pipeline of these settings; ValueError, in words, where there is none."""
    name, chunks = schedule_and_chunks(num_layers, parallel)
    placement = schedule_placement(name, parallel.pp, chunks)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage if SCHEDULES[name].has_groups else None
    ends = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    return Pipeline(name, placement, group, tuple(layer_ranges(num_layers, placement.num_stages, *ends)))


def schedule_and_chunks(num_layers: int, parallel: ParallelConfig) -> tuple[str, int]:
    """(schedule that runs, chunks per rank). Without a pipeline there is one chunk, whatever the flags say."""
    name, pp, per_stage = parallel.pipeline_schedule, parallel.pp, parallel.num_layers_per_virtual_pipeline_stage
    if pp == 1:
        return "1f1b", 1
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if chunks is None and per_stage is not None:
        chunks, rest = divmod(num_layers, pp * per_stage)
        if rest or not chunks:
            raise ValueError(f"{num_layers} layers on {pp} pipeline ranks are not cut into chunks of {per_stage}")
    if chunks is None:
        chunks = SCHEDULES[name].default_chunks
    if chunks > MOST_CHUNKS:
        raise ValueError(f"{chunks} chunks per rank are more than {MOST_CHUNKS}")
    if name == "1f1b" and chunks > 1:
        name = "interleaved"
    if name == "interleaved" and chunks < 2:
        raise ValueError(f"interleaving needs 2 or more chunks per rank, not {chunks}")
    if name != "interleaved" and chunks != SCHEDULES[name].default_chunks:
        runs = SCHEDULES[name].default_chunks
        raise ValueError(f"{name} runs {runs} chunk{'s' if runs > 1 else ''} per rank, not {chunks}")
    return name, chunks


def is_automatic(parallel: ParallelConfig) -> bool:
    """Whether the pipeline is chosen from costs rather than by the flags alone."""
    return parallel.pp > 1 and AUTO in (parallel.pipeline_schedule, parallel.pipeline_split)


def pipeline_of(config: Config) -> Pipeline:
    """The pipeline of a run whose flags say all about it; an automatic one comes from planner/automatic.py."""
    if is_automatic(config.parallel):
        raise ValueError("an automatic pipeline is chosen from costs (planner/automatic.py), it does not follow from flags")
    return plan_pipeline(config.model.num_layers, config.parallel)


def pipeline_warnings(config: Config) -> list[str]:
    """What a run's schedule wastes, in words; it runs all the same. An automatic choice says itself what it costs."""
    if is_automatic(config.parallel):
        return []
    return [f"warning: {text}" for text in pipeline_of(config).warnings(config.num_microbatches)]
