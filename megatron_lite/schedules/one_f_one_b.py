"""1F1B, or PipeDream-flush (Narayanan et al., 2021): a backward as early as it can run, then one forward each.

    1f1b: 4 ranks, 8 microbatches; makespan 33, bubble 27.3% of the step
    time    0         5         10        15        20        25        30
    rank 0  0 1 2 3 . . . . . .[0 ] 4[1 ] 5[2 ] 6[3 ] 7[4 ] .[5 ] .[6 ] .[7 ]  peak 4
    rank 1  . 0 1 2 . . . .[0 ] 3[1 ] 4[2 ] 5[3 ] 6[4 ] 7[5 ] .[6 ] .[7 ] . .  peak 3
    rank 2  . . 0 1 . .[0 ] 2[1 ] 3[2 ] 4[3 ] 5[4 ] 6[5 ] 7[6 ] .[7 ] . . . .  peak 2
    rank 3  . . . 0[0 ] 1[1 ] 2[2 ] 3[3 ] 4[4 ] 5[5 ] 6[6 ] 7[7 ] . . . . . .  peak 1
            0 forward   [0] backward   . idle

Rank r runs w = min(p-1-r, m) forwards to warm up, then forward and backward in turn, then the w backwards left over.
Bubble (p-1)(F+B+W) for any number of microbatches m, the same as GPipe's: (p-1)/(m+p-1) of the step when stages cost
the same. What it gains is memory: rank r holds min(p-r, m) microbatches, however large m becomes.
"""

from megatron_lite.schedules.actions import Action


def one_f_one_b(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank."""
    warmup = min(pp_size - 1 - pp_rank, num_microbatches)
    actions = [Action("F", 0, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches - warmup):
        actions += [Action("F", 0, warmup + microbatch), Action("BW", 0, microbatch)]
    return actions + [Action("BW", 0, microbatch) for microbatch in range(num_microbatches - warmup, num_microbatches)]
