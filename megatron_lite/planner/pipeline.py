"""What the flags make of the pipeline: schedule, chunks, where the stages lie and which layers each holds.

    --pipeline-schedule        1f1b      interleaved   zbv, dualpipev      the others
    chunks per rank            1         2             2                   1
    or as given                any: with 2 or more it is interleaved       no other number runs

Stages are numbered over the whole pipeline, 0 takes tokens and the last makes the loss; the split of the layers and the
flags for its ends are about these stages. Which rank and chunk a stage is, `Placement` says:

    8 layers, pp 2, 1f1b with 2 chunks     rank 0: layers 0..1, 4..5    rank 1: 2..3, 6..7     (loop)
    8 layers, pp 2, zbv                    rank 0: layers 0..1, 6..7    rank 1: 2..3, 4..5     (v)

Worked out here alone: what is built, planned, validated and reported all comes from `plan_pipeline`.
"""

from typing import NamedTuple

from megatron_lite.config import Config, ParallelConfig
from megatron_lite.planner.split import layer_ranges
from megatron_lite.schedules import ASYNCHRONOUS, EVERY, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Action, Placement
from megatron_lite.schedules.advice import schedule_warnings
from megatron_lite.schedules.asynchronous import delay, most_versions

MOST_CHUNKS = 256  # per rank: so many a pipeline message can tell apart (comm/p2p.py)


class Chunk(NamedTuple):
    """One chunk of one rank: its stage and that stage's layers; `first` takes tokens, `last` makes the loss."""

    stage: int
    layers: range
    first: bool
    last: bool


class Pipeline(NamedTuple):
    """A pipeline without its number of microbatches, which the lists of actions need."""

    schedule: str  # one of EVERY; interleaved where the flags say 1f1b and several chunks
    placement: Placement
    group_size: int | None  # microbatches per group of an interleaved schedule, None: as many as ranks
    layers: tuple[range, ...]  # of every stage
    drain_interval: int = 1  # iterations from one empty pipeline to the next; above 1 where the schedule is asynchronous

    @property
    def asynchronous(self) -> bool:
        return self.schedule in ASYNCHRONOUS

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    def chunks(self, rank: int) -> list[Chunk]:
        """What a pipeline rank holds, in chunk order."""
        stages = [self.placement.stage(rank, chunk) for chunk in range(self.num_chunks)]
        return [Chunk(s, self.layers[s], s == 0, s == len(self.layers) - 1) for s in stages]

    def actions(self, num_microbatches: int) -> list[list[Action]]:
        """The action lists of all ranks; ScheduleError where there are none."""
        return build_schedule(self.schedule, *self._sizes(num_microbatches))

    def planned(self, num_microbatches: int) -> int:
        """As many microbatches as a plan has to look at: those of a step, or of enough steps to fill the pipeline."""
        most = num_microbatches * self.drain_interval
        return min(most, max(num_microbatches, 2 * self.placement.pp_size)) if self.asynchronous else num_microbatches

    def weight_versions(self, rank: int, num_microbatches: int) -> int:
        """Copies of its weights that a rank keeps, the newest included: 1, or more in an asynchronous pipeline."""
        pp = self.placement.pp_size
        return most_versions(self.schedule, pp, rank, num_microbatches) if self.asynchronous else 1

    def problems(self, num_microbatches: int) -> list[str]:
        """Why there are no lists for so many microbatches, in words with what would work; empty where there are."""
        return schedule_problems(self.schedule, *self._sizes(num_microbatches))

    def warnings(self, num_microbatches: int) -> list[str]:
        """What runs but wastes time or memory, or takes gradients at old weights."""
        if self.asynchronous:
            return [f"--pipeline-schedule {self.schedule}: {self._stale(num_microbatches)}"]
        return schedule_warnings(self.schedule, *self._sizes(num_microbatches))

    def _stale(self, num_microbatches: int) -> str:
        most = 1 if self.schedule == "pipedream-2bw" else delay(self.placement.pp_size, 0, num_microbatches)
        return (f"no flush between updates, so gradients are of weights up to {most:.3g} updates old: the result depends on "
                "--pipeline-model-parallel-size; see docs/parallelism.md for when not to use it")  # fmt: skip

    def _sizes(self, num_microbatches: int) -> tuple[int, int, int, int | None]:
        return self.placement.pp_size, self.num_chunks, num_microbatches, self.group_size


def plan_pipeline(num_layers: int, parallel: ParallelConfig) -> Pipeline:
    """The pipeline of these settings; ValueError, in words, where there is none."""
    name, chunks = schedule_and_chunks(num_layers, parallel)
    placement = schedule_placement(name, parallel.pp, chunks)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage if EVERY[name].has_groups else None
    ends = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    drain = parallel.pipeline_drain_interval if name in ASYNCHRONOUS else 1
    return Pipeline(name, placement, group, tuple(layer_ranges(num_layers, placement.num_stages, *ends)), drain)


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
        chunks = EVERY[name].default_chunks
    if chunks > MOST_CHUNKS:
        raise ValueError(f"{chunks} chunks per rank are more than {MOST_CHUNKS}")
    if name == "1f1b" and chunks > 1:
        name = "interleaved"
    if name == "interleaved" and chunks < 2:
        raise ValueError(f"interleaving needs 2 or more chunks per rank, not {chunks}")
    if name != "interleaved" and chunks != EVERY[name].default_chunks:
        runs = EVERY[name].default_chunks
        raise ValueError(f"{name} runs {runs} chunk{'s' if runs > 1 else ''} per rank, not {chunks}")
    return name, chunks


def pipeline_of(config: Config) -> Pipeline:
    """The pipeline of a run."""
    return plan_pipeline(config.model.num_layers, config.parallel)


def pipeline_warnings(config: Config) -> list[str]:
    """What a run's schedule wastes, in words; it runs all the same."""
    return [f"warning: {text}" for text in pipeline_of(config).warnings(config.num_microbatches)]
