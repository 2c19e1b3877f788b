"""What the flags make of the pipeline: schedule, chunks, where the stages lie and which layers each holds.

    --pipeline-schedule        1f1b      interleaved   zbv, dualpipev      the others
    chunks per rank            1         2             2                   1
    or as given                any: with 2 or more it is interleaved       no other number runs

A schedule of one's own, --pipeline-schedule-file, says itself where its chunks lie and how many there are.

Stages are numbered over the whole pipeline, 0 takes tokens and the last makes the loss; the split of the layers and the
flags for its ends are about these stages. Which rank and chunk a stage is, `Placement` says:

    8 layers, pp 2, 1f1b with 2 chunks     rank 0: layers 0..1, 4..5    rank 1: 2..3, 6..7     (loop)
    8 layers, pp 2, zbv                    rank 0: layers 0..1, 6..7    rank 1: 2..3, 4..5     (v)

Worked out here alone: what is built, planned, validated and reported all comes from `plan_pipeline`. With
`--pipeline-schedule auto` or `--pipeline-split auto` the flags alone do not say: planner/automatic.py chooses, from costs.
"""

from pathlib import Path
from typing import NamedTuple

from megatron_lite.config import Config, ParallelConfig
from megatron_lite.planner.split import layer_ranges
from megatron_lite.schedules import ASYNCHRONOUS, EVERY, build_schedule, schedule_placement, schedule_problems
from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.advice import schedule_warnings
from megatron_lite.schedules.asynchronous import delay, most_versions
from megatron_lite.schedules.file import ScheduleFile, read_schedule

AUTO = "auto"
MOST_CHUNKS = 256  # per rank: so many a pipeline message can tell apart (comm/p2p.py)


class Chunk(NamedTuple):
    """One chunk of one rank: its stage and that stage's layers; `first` takes tokens, `last` makes the loss. A `copy` is
    the second place of a stage that lies on two ranks: it is trained alike, but counted and saved from the first."""

    stage: int
    layers: range
    first: bool
    last: bool
    copy: bool = False


class Pipeline(NamedTuple):
    """A pipeline without its number of microbatches, which the lists of actions need."""

    schedule: str  # one of EVERY; interleaved where the flags say 1f1b and several chunks; or the name of `lists` or `file`
    placement: Placement
    group_size: int | None  # microbatches per group of an interleaved schedule, None: as many as ranks
    layers: tuple[range, ...]  # of every stage
    lists: tuple[tuple[Action, ...], ...] | None = None  # the actions of all ranks, where an automatic choice made them
    file: ScheduleFile | None = None  # where the user did
    drain_interval: int = 1  # iterations from one empty pipeline to the next; above 1 where the schedule is asynchronous

    @property
    def named(self) -> bool:
        """Whether the lists come from a schedule of the registry, which makes them for any number of microbatches."""
        return self.lists is None and self.file is None

    @property
    def asynchronous(self) -> bool:
        return self.named and self.schedule in ASYNCHRONOUS

    @property
    def has_groups(self) -> bool:
        return self.named and EVERY[self.schedule].has_groups

    @property
    def num_chunks(self) -> int:
        return self.placement.num_chunks

    def chunks(self, rank: int) -> list[Chunk]:
        """What a pipeline rank holds, in chunk order."""
        chunks = []
        for chunk in range(self.num_chunks):
            stage = self.placement.stage(rank, chunk)
            copy = chunk == 1 and self.placement.mirror(rank, chunk) is not None
            chunks.append(Chunk(stage, self.layers[stage], stage == 0, stage == len(self.layers) - 1, copy))
        return chunks

    def actions(self, num_microbatches: int) -> list[list[Action]]:
        """The action lists of all ranks; ScheduleError where there are none."""
        if self.named:
            return build_schedule(self.schedule, *self._sizes(num_microbatches))
        if problems := self.problems(num_microbatches):
            raise ScheduleError("\n".join(problems))
        return self.file.schedule if self.lists is None else [list(actions) for actions in self.lists]

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
        if self.file is not None:
            return self.file.problems(self.placement.pp_size, num_microbatches)
        if self.lists is not None:
            made_for = sum(action.kind == "F" and action.chunk == 0 for action in self.lists[0])
            wrong = made_for != num_microbatches
            return [f"the {self.schedule} lists are for {made_for} microbatches, not {num_microbatches}"] if wrong else []
        return schedule_problems(self.schedule, *self._sizes(num_microbatches))

    def warnings(self, num_microbatches: int) -> list[str]:
        """What runs but wastes time or memory, or takes gradients at old weights; of lists of one's own nothing is known but
        what their picture shows."""
        if self.asynchronous:
            return [f"--pipeline-schedule {self.schedule}: {self._stale(num_microbatches)}"]
        return schedule_warnings(self.schedule, *self._sizes(num_microbatches)) if self.named else []

    def _stale(self, num_microbatches: int) -> str:
        most = 1 if self.schedule == "pipedream-2bw" else delay(self.placement.pp_size, 0, num_microbatches)
        return (f"no flush between updates, so gradients are of weights up to {most:.3g} updates old: the result depends on "
                "--pipeline-model-parallel-size; see docs/parallelism.md for when not to use it")  # fmt: skip

    def _sizes(self, num_microbatches: int) -> tuple[int, int, int, int | None]:
        return self.placement.pp_size, self.num_chunks, num_microbatches, self.group_size


def plan_pipeline(num_layers: int, parallel: ParallelConfig) -> Pipeline:
    """The pipeline of these settings; ValueError, in words, where there is none."""
    ends = parallel.decoder_first_pipeline_num_layers, parallel.decoder_last_pipeline_num_layers
    if parallel.pipeline_schedule_file is not None and parallel.pp > 1:
        file = read_schedule(parallel.pipeline_schedule_file)
        name, placement, group = Path(file.path).name, _placement_of(file, num_layers, parallel), None
        return Pipeline(name, placement, group, tuple(layer_ranges(num_layers, placement.num_stages, *ends)), file=file)
    name, chunks = schedule_and_chunks(num_layers, parallel)
    placement = schedule_placement(name, parallel.pp, chunks)
    group = parallel.microbatch_group_size_per_virtual_pipeline_stage if EVERY[name].has_groups else None
    layers = tuple(layer_ranges(num_layers, placement.num_stages, *ends))
    drain = parallel.pipeline_drain_interval if name in ASYNCHRONOUS else 1
    return Pipeline(name, placement, group, layers, drain_interval=drain)


def schedule_and_chunks(num_layers: int, parallel: ParallelConfig) -> tuple[str, int]:
    """(schedule that runs, chunks per rank). Without a pipeline there is one chunk, whatever the flags say."""
    name = parallel.pipeline_schedule
    if parallel.pp == 1:
        return "1f1b", 1
    chunks = _given_chunks(num_layers, parallel, EVERY[name].placement_kind)
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


def is_automatic(parallel: ParallelConfig) -> bool:
    """Whether the pipeline is chosen from costs rather than by the flags alone."""
    return parallel.pp > 1 and AUTO in (parallel.pipeline_schedule, parallel.pipeline_split)


def _given_chunks(num_layers: int, parallel: ParallelConfig, placement_kind: str) -> int | None:
    """Chunks per rank as the flags say, in either of their two ways; a stage is two chunks where it lies on two ranks."""
    pp, per_stage = parallel.pp, parallel.num_layers_per_virtual_pipeline_stage
    if parallel.num_virtual_stages_per_pipeline_rank is not None or per_stage is None:
        return parallel.num_virtual_stages_per_pipeline_rank
    chunks, rest = divmod(num_layers, pp * per_stage)
    if rest or not chunks:
        raise ValueError(f"{num_layers} layers on {pp} pipeline ranks are not cut into chunks of {per_stage}")
    return 2 * chunks if placement_kind == "bidirectional" else chunks


def _placement_of(file: ScheduleFile, num_layers: int, parallel: ParallelConfig) -> Placement:
    """Where a file's chunks lie on the ranks of the run; ValueError where the flags say otherwise."""
    placement, given = file.placement(), _given_chunks(num_layers, parallel, file.kind)
    if placement.pp_size != parallel.pp:
        raise ScheduleError(file.problems(parallel.pp, file.num_microbatches)[0])
    if placement.num_chunks > MOST_CHUNKS:
        raise ScheduleError(f"{file.path}: {placement.num_chunks} chunks per rank are more than {MOST_CHUNKS}")
    if given is not None and given != placement.num_chunks:
        raise ValueError(f"{file.path} has {placement.num_chunks} chunks per rank, not {given}")
    return placement


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
