"""ZBV (Qi et al., 2024, Pipeline Parallelism with Controllable Memory): a V of two chunks, as little memory as 1F1B.

    zbv: 4 ranks x 2 chunks, 8 microbatches; makespan 25.5, bubble 5.9% of the step
    time    0                   2.5                 5                   7.5                 10
    rank 0  0   1   2   3   4   5   6   0'  b0' w0' 1'  b1' w1' 2'  b2' w2' 3'  b3' w3' 7   b0  w0  4'  b4' w4' b1
    rank 1  .   0   1   2   3   4   0'  5   1'  b0' w0' 2'  b1' w1' 3'  b2' w2' 6   b0  w0  4'  b3' w3' 7   b1  w1
    rank 2  .   .   0   1   2   0'  3   1'  4   2'  b0' w0' 3'  b1' w1' 5   b0  w0  4'  b2' w2' 6   b1  w1  5'  b3'
    rank 3  .   .   .   0   0'  1   1'  2   2'  3   3'  b0' w0' 4   b0  w0  4'  b1' w1' 5   b1  w1  5'  b2' w2' 6
    time    13              15                  17.5                20                  22.5                25
    rank 0  w1  5'  b5' w5' b2  w2  6'  b6' w6' b3  w3  7'  b7' w7' b4  w4  b5  w5  b6  w6  b7  w7  .   .   .    peak 4
    rank 1  5'  b4' w4' b2  w2  6'  b5' w5' b3  w3  7'  b6' w6' b4  b7' b5  w4  b6  w5  b7  w6  w7' w7  .   .    peak 4
    rank 2  w3' 7   b2  w2  6'  b4' w4' b3  w3  7'  b5' w5' b4  b6' b5  b7' b6  w4  b7  w5  w6' w7' w6  w7  .    peak 4
    rank 3  b2  w2  6'  b3' w3' 7   b3  w3  7'  b4' w4' b4  b5' b5  b6' b6  b7' b7  w4  w5' w6' w7' w5  w6  w7   peak 4
            0 forward   b0 input gradient   w0 weight gradient   ' chunk 1   . idle

The pipeline runs down the ranks in chunk 0 and back up in chunk 1, so that rank 0 holds the first and the last stage:
embedding, head and loss are one rank's. With ' for chunk 1, rank r runs 2(p-r)-1 F, r times (F' F), p-r times
(F' B' W'), then (F B W F' B' W') while there are forwards; then r times (B B'), p-r times (B W), the W' and the W.

With F = B = W the span bubble is 0, and a step that ends for all ranks together pays (p-1)F/2 (F of both chunks):
half of ZB-H1, and the least of all at 1F1B's memory: p microbatches on every rank. With other costs the order is
not without gaps: the bubble is about (p-1)B/2 where B >= F and W <= B. All this for m >= 2p-1; with fewer
microbatches the order is that of 2p-1, without those that are not there.
"""

from itertools import count

from megatron_lite.schedules.actions import Action


def zbv(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank."""
    total = max(num_microbatches, 2 * pp_size - 1)
    behind = pp_size - pp_rank  # ranks from here to the turn of the V
    words = ["F0"] * (2 * behind - 1) + ["F1", "F0"] * pp_rank + ["F1", "B1", "W1"] * behind
    started = words.count("F0")
    for turn in range(total - words.count("F1")):
        words += (["F0"] if started + turn < total else []) + ["B0", "W0", "F1", "B1", "W1"]
    words += ["B0", "B1"] * pp_rank + ["B0", "W0"] * behind
    words += ["W1"] * (total - words.count("W1")) + ["W0"] * (total - words.count("W0"))
    numbers = {word: count() for word in set(words)}
    actions = [Action(word[0], int(word[1]), next(numbers[word])) for word in words]
    return [action for action in actions if action.microbatch < num_microbatches]
