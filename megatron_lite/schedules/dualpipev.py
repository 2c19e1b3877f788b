"""DualPipeV (DeepSeek-AI, 2025): DualPipe cut in half and folded into a V, so that no stage lies twice.

    dualpipev: 4 ranks x 2 chunks, 8 microbatches; makespan 25.5, bubble 5.9% of the step
    time    0                   2.5                 5                   7.5                 10
    rank 0  0   1   2   3   4   5   6   0'  b0' w0' 1'  b1' w1' 2'  b2' w2' 3'  7  [3'    ] 4' [0     ][4'    ] 5'
    rank 1  .   0   1   2   3   4   0'  5   1'  b0' w0' 2'  b1' w1' 3'  6  [2'    ] 4' [0     ] 7  [3'    ] 5' [1
    rank 2  .   .   0   1   2   0'  3   1'  4   2'  b0' w0' 3'  5  [1'    ] 4' [0     ] 6  [2'    ] 5' [1     ] 7
    rank 3  .   .   .   0   0'  1   1'  2   2'  3   3'  4  [0'    ] 4' [0     ] 5  [1'    ] 5' [1     ] 6  [2'    ]
    time    13              15                  17.5                20                  22.5                25
    rank 0  .  [1     ][5'    ] 6'  .  [2     ][6'    ] 7'  .  [3     ][7'    ] b4  w4  b5  w5  b6  w6  b7  w7   peak 4.5
    rank 1    ][4'    ] 6'  .  [2     ][5'    ] 7'  .  [3     ][6'    ][4     ] b7' b5  w7' b6  w5  b7  w6  w7   peak 4.5
    rank 2 [3'    ] 6' [2     ][4'    ] 7'  .  [3     ][5'    ][4     ][6'    ] b5  b7' b6  w5  b7  w7' w6  w7   peak 4.5
    rank 3  6' [2     ] 7  [3'    ] 7' [3     ][4'    ][4     ][5'    ][5     ] b6' b6  b7' b7  w6' w6  w7' w7   peak 4.5
            0 forward   [0] backward   b0 input gradient   w0 weight gradient   ' chunk 1   . idle

The eight steps of DualPipe (dualpipe.py) with h = p, n = r and M = m, on a V of two chunks: the way down the ranks is
chunk 0, the way back up chunk 1. Rank 0 holds the first and the last stage, embedding, head and loss.

Bubble in times of one chunk, where an F|BW starts and ends as one and takes FB: (p-1)(FB + BW - 3W) on the busiest
rank for F = B = W; if nothing is hidden, (p-1) max(2F, 2F+B-W) as long as B <= 4F/3: step 27 in the example above, as
ZB-H1. One after the other, as in the picture, it is half of that for F = B = W, as much as ZBV's. Every rank keeps
p + 1/2 microbatches. It needs m >= 2p.
"""

from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.dualpipe import eight_steps
from megatron_lite.schedules.sizes import HOW_MANY, Sizes, two_chunk_problems


def dualpipev(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank."""
    return eight_steps(pp_size, pp_rank, (0, 1), (range(num_microbatches), range(num_microbatches)))


def dualpipev_problems(sizes: Sizes) -> list[str]:
    pp, _, total, _ = sizes
    found = two_chunk_problems(sizes)
    if total < 2 * pp:
        found.append(f"{total} {HOW_MANY}: the V needs at least 2 x {pp} ranks; {2 * pp} would work")
    return found
