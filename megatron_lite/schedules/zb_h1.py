"""ZB-H1 (Qi et al., 2023, Zero Bubble Pipeline Parallelism): 1F1B whose weight gradients wait, to fill the bubble.

    zb-h1: 4 ranks, 8 microbatches; makespan 27, bubble 11.1% of the step
    time    0              5              10             15             20             25
    rank 0  0  1  2  3  .  .  .  b0 w0 4  b1 w1 5  b2 w2 6  b3 w3 7  b4 w4 b5 w5 b6 w6 b7 w7  peak 4
    rank 1  .  0  1  2  .  .  b0 3  b1 w0 4  b2 w1 5  b3 w2 6  b4 w3 7  b5 w4 b6 w5 b7 w6 w7  peak 4
    rank 2  .  .  0  1  .  b0 2  b1 3  b2 w0 4  b3 w1 5  b4 w2 6  b5 w3 7  b6 w4 b7 w5 w6 w7  peak 4
    rank 3  .  .  .  0  b0 1  b1 2  b2 3  b3 w0 4  b4 w1 5  b5 w2 6  b6 w3 7  b7 w4 w5 w6 w7  peak 4
            0 forward   b0 input gradient   w0 weight gradient   . idle

Rank r runs min(p-r, m) forwards, then for each k: B_k, W_{k-r} (from k = r on), the next forward; at the end the W
left over. Nobody waits for a W, so those of rank r come r microbatches late and keep the end of the step busy.

Bubble (p-1) max(F, B, F+B-W) for m >= p, a third of 1F1B's if F = B = W. Held until W, every rank keeps min(p, m)
microbatches; if B frees what W does not need, rank r keeps p-r whole ones and the inputs of the linears of r more.
W before the next forward costs no time and one microbatch less than after it.
"""

from megatron_lite.schedules.actions import Action


def late_weights(num_microbatches: int, warmup: int, delay: int) -> list[Action]:
    """`warmup` forwards, then B_k, W_{k-delay} and the next forward for each k, and the W left over."""
    warmup = min(warmup, num_microbatches)
    actions = [Action("F", 0, microbatch) for microbatch in range(warmup)]
    for microbatch in range(num_microbatches):
        actions.append(Action("B", 0, microbatch))
        if microbatch >= delay:
            actions.append(Action("W", 0, microbatch - delay))
        if warmup + microbatch < num_microbatches:
            actions.append(Action("F", 0, warmup + microbatch))
    left = range(max(0, num_microbatches - delay), num_microbatches)
    return actions + [Action("W", 0, microbatch) for microbatch in left]


def zb_h1(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank."""
    return late_weights(num_microbatches, warmup=pp_size - pp_rank, delay=pp_rank)
