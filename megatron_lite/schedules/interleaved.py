"""Interleaved 1F1B (Narayanan et al., 2021): v chunks per rank, so that the pipeline fills v times faster.

    interleaved: 4 ranks x 2 chunks, 8 microbatches; makespan 28.5, bubble 15.8% of the step
    time    0              2.5            5              7.5            10             12.5
    rank 0  0  1  2  3  0' 1' 2' 3' 4  5  6  .  .  . [0'  ] 7 [1'  ] .  4'[2'  ] 5'[3'  ] 6'[0   ]
    rank 1  .  0  1  2  3  0' 1' 2' 3' 4  .  . [0'  ] 5 [1'  ] 6 [2'  ] 7 [3'  ] 4'[0   ] 5'[1   ]
    rank 2  .  .  0  1  2  3  0' 1' 2' . [0'  ] 3'[1'  ] 4 [2'  ] 5 [3'  ] 6 [0   ] 7 [1   ] 4'[2
    rank 3  .  .  .  0  1  2  3  0'[0'  ] 1'[1'  ] 2'[2'  ] 3'[3'  ] 4 [0   ] 5 [1   ] 6 [2   ] 7
    time    14.5              17.5           20             22.5           25             27.5
    rank 0  7'[1   ][2   ] . [3   ] . [4'  ] . [5'  ] . [6'  ] . [7'  ][4   ][5   ][6   ][7   ]  peak 5.5
    rank 1  6'[2   ] 7'[3   ] . [4'  ] . [5'  ] . [6'  ] . [7'  ][4   ][5   ][6   ][7   ] .  .   peak 4.5
    rank 2   ] 5'[3   ] 6'[4'  ] 7'[5'  ] . [6'  ] . [7'  ][4   ][5   ][6   ][7   ] .  .  .  .   peak 3.5
    rank 3 [3   ] 4'[4'  ] 5'[5'  ] 6'[6'  ] 7'[7'  ][4   ][5   ][6   ][7   ] .  .  .  .  .  .   peak 2.5
            0 forward   [0] backward   ' chunk 1   . idle

Microbatches go through the chunks in groups of g (default p): g microbatches through chunk 0, the same g through
chunk 1 and so on, then the next g. Forward k is entry k of that order, backward k the same entry with the chunks
reversed. Rank r runs w = min(2(p-1-r) + (v-1)g, mv) forwards to warm up, then forward and backward in turn.

Bubble (p-1)(F+B+W)/v: a v-th of 1F1B's, for v times as many messages. Rank r holds (2(p-1-r) + (v-1)g + 1)/v
microbatches: for g = p, rank 0 holds p(1 + (p-1)/(pv)). The bubble is exact if p <= g <= m and the last group, of
m % g microbatches, is either whole or has at least p of them (the rule Megatron-LM asks for). With a shorter last
group its microbatches come back to rank 0 too late: the lists then run with a larger bubble, or wait for ever.
"""

from collections.abc import Sequence

from megatron_lite.schedules.actions import Action, Placement, ScheduleError
from megatron_lite.schedules.check import check
from megatron_lite.schedules.sizes import CHUNKS, GROUP, HOW_MANY, Sizes, nearest


def order_table(num_chunks: int, num_microbatches: int, group_size: int) -> list[tuple[int, int]]:
    """(chunk, microbatch) of every forward of a rank, in order; the last group may be shorter."""
    table = []
    for first in range(0, num_microbatches, group_size):
        group = range(first, min(first + group_size, num_microbatches))
        table += [(chunk, microbatch) for chunk in range(num_chunks) for microbatch in group]
    return table


def interleaved(
    pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int, group_size: int | None = None
) -> list[Action]:
    """The actions of one rank."""
    group = group_size or pp_size
    table = order_table(num_chunks, num_microbatches, group)
    forwards = [Action("F", chunk, microbatch) for chunk, microbatch in table]
    backwards = [Action("BW", num_chunks - 1 - chunk, microbatch) for chunk, microbatch in table]
    warmup = min(2 * (pp_size - 1 - pp_rank) + (num_chunks - 1) * group, len(table))
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards[: len(table) - warmup], strict=True):
        actions += [forward, backward]
    return actions + backwards[len(table) - warmup :]


def whole_groups(pp_size: int, num_microbatches: int, group_size: int) -> bool:
    """Megatron-LM's rule: groups of at least p, the last one too."""
    rest = num_microbatches % group_size if group_size else 0
    return 0 < pp_size <= group_size <= num_microbatches and (rest == 0 or rest >= pp_size)


def other_sizes(sizes: Sizes) -> str:
    """The nearest sizes that obey the rule, as words."""
    pp, _, total, group = sizes
    group = group or pp
    groups = nearest(group, lambda size: whole_groups(pp, total, size), range(pp, total + 1))
    totals = nearest(total, lambda number: whole_groups(pp, number, group), range(1, total + 2 * group + 1))
    return f"{GROUP} {groups} or {totals} microbatches" if groups != "none" else f"{totals} microbatches"


def interleaved_problems(sizes: Sizes) -> list[str]:
    pp, chunks, total, group = sizes
    found = []
    if chunks < 2:
        found.append(f"{CHUNKS} {chunks}: interleaving needs 2 or more chunks per rank; 2 would work (1 is 1f1b)")
    which = f"{GROUP} {group}" if group is not None else f"{GROUP} (default: the {pp} pipeline ranks)"
    size = pp if group is None else group
    if size < pp:
        found.append(f"{which}: smaller than the {pp} pipeline ranks; {other_sizes(Sizes(pp, chunks, total, pp - 1))} would")
    elif size > total:
        found.append(f"{which}: larger than the {total} {HOW_MANY}; {other_sizes(sizes)} would work")
    elif not found and not whole_groups(pp, total, size) and (waits := _deadlock(sizes)):
        rest = total % size
        found.append(
            f"{total} {HOW_MANY}: groups of {size} leave a last one of {rest}, fewer than the {pp} pipeline ranks; "
            f"{waits}; {other_sizes(sizes)} would work"
        )
    return found


def _deadlock(sizes: Sizes) -> str:
    """What the checker says; empty if the lists run."""
    pp, chunks, total, group = sizes
    schedule: Sequence[list[Action]] = [interleaved(pp, rank, chunks, total, group) for rank in range(pp)]
    try:
        check(schedule, Placement("loop", pp, chunks), total)
    except ScheduleError as error:
        return str(error)
    return ""
