"""GPipe (Huang et al., 2019): all forwards, then all backwards.

    gpipe: 4 ranks, 8 microbatches; makespan 33, bubble 27.3% of the step
    time    0         5         10        15        20        25        30
    rank 0  0 1 2 3 4 5 6 7 . . . . . . . . .[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ]  peak 8
    rank 1  . 0 1 2 3 4 5 6 7 . . . . . .[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ] . .  peak 8
    rank 2  . . 0 1 2 3 4 5 6 7 . . .[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ] . . . .  peak 8
    rank 3  . . . 0 1 2 3 4 5 6 7[0 ][1 ][2 ][3 ][4 ][5 ][6 ][7 ] . . . . . .  peak 8
            0 forward   [0] backward   . idle

Bubble (p-1)(F+B+W) for any number of microbatches m: (p-1)/(m+p-1) of the step when stages cost the same. Every rank
holds all m microbatches at its peak, so m is bounded by memory; 1F1B has the same bubble with min(p-r, m) of them.
"""

from megatron_lite.schedules.actions import Action


def gpipe(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank, the same on all ranks; backwards in the order of the forwards."""
    forwards = [Action("F", 0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action("BW", 0, microbatch) for microbatch in range(num_microbatches)]
    return forwards + backwards
