"""ZB-H2 (Qi et al., 2023, Zero Bubble Pipeline Parallelism): more forwards in advance, no gap before the last W.

    zb-h2: 4 ranks, 8 microbatches; makespan 27, bubble 11.1% of the step
    time    0              5              10             15             20             25
    rank 0  0  1  2  3  4  5  6  b0 w0 7  b1 w1 b2 w2 b3 w3 b4 w4 b5 w5 b6 w6 b7 w7 .  .  .   peak 7
    rank 1  .  0  1  2  3  4  b0 5  b1 6  b2 w0 7  b3 w1 b4 w2 b5 w3 b6 w4 b7 w5 w6 w7 .  .   peak 7
    rank 2  .  .  0  1  2  b0 3  b1 4  b2 5  b3 6  b4 w0 7  b5 w1 b6 w2 b7 w3 w4 w5 w6 w7 .   peak 7
    rank 3  .  .  .  0  b0 1  b1 2  b2 3  b3 4  b4 5  b5 6  b6 w0 7  b7 w1 w2 w3 w4 w5 w6 w7  peak 7
            0 forward   b0 input gradient   w0 weight gradient   . idle

Rank r runs min(2(p-r)-1, m) forwards, then for each k: B_k, W_{k-2r} (from k = 2r on), the next forward; at the end
the W left over.

Two bubbles, for m >= 2p-1. The papers' "zero" is the span bubble, (p-1)(F+B-2W): no rank idles between its own first
and last action, but rank r starts r F later and ends as much later. A step that ends for all ranks together (gradient
clipping, overflow check) pays (p-1) max(F, B-F, F+B-2W), with F = B = W no less than ZB-H1. Held until W, every rank
keeps 2p-1 microbatches; if B frees what W does not need, rank r keeps 2(p-r)-1 whole ones and the inputs of the
linears of 2r more.
"""

from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.zb_h1 import late_weights


def zb_h2(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank."""
    return late_weights(num_microbatches, warmup=2 * (pp_size - pp_rank) - 1, delay=2 * pp_rank)
