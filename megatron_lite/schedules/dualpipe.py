"""DualPipe (DeepSeek-AI, 2024, DeepSeek-V3): two pipelines through the same ranks, one in each direction.

    dualpipe: 4 ranks x 2 chunks, 8 microbatches; makespan 25, bubble 4.0% of the step
    time    0                   5                   10                  15                  20
    rank 0  0   1   2   4'  b4' w4' 5'  3  [5'    ] 6' [0     ][6'    ] 7'  .  [1     ][7'    ] b2  w2  b3  w3   peak 5
    rank 1  .   0   4'  1   5'  2  [4'    ] 6' [0     ] 3  [5'    ] 7' [1     ][6'    ][2     ] b7' b3  w7' w3   peak 5
    rank 2  .   4'  0   5'  1   6' [0     ] 2  [4'    ] 7' [1     ] 3  [5'    ][2     ][6'    ] b3  b7' w3  w7'  peak 5
    rank 3  4'  5'  6'  0   b0  w0  1   7' [1     ] 2  [4'    ][2     ] 3   .  [5'    ][3     ] b6' w6' b7' w7'  peak 5
            0 forward   [0] backward   b0 input gradient   w0 weight gradient   ' chunk 1   . idle

Each rank holds two chunks: stage r of the pipeline that runs down the ranks (microbatches 0..m/2-1 enter at rank 0)
and stage p-1-r of the one that runs up (' : microbatches m/2..m-1 enter at rank p-1). Every stage thus lies on two
ranks, r and p-1-r, which sum their gradients, and losses come from both ends. A forward of one direction stands next
to a backward of the other wherever possible, F|BW: an executor may run the two at the same time, so that the
communication of one hides behind the computation of the other.

Eight steps, for the rank at position n = min(r, p-1-r) of h = p/2, with M = m/2 microbatches each way; F is its own
direction (down for the first half of the ranks), F' the other:

    1   2(h-n-1) x  F                    5   h-n-1 x  BW' (F'|BW)
    2   n+1      x  F F'                 6   n+1   x  BW' BW, in the second half B' B
    3   h-n-1    x  B' W' F'             7   h-n-1 x  W B
    4   M-2h+n+1 x  (F|BW') (F'|BW)      8   n+1   x  W

Bubble, where an F|BW starts and ends as one and takes FB: (p/2-1)(FB + BW - 3W) on the busiest rank for F = B = W;
if nothing is hidden, FB = F + BW, it is (p/2-1) max(2F, 2F+B-W) as long as B <= 4F/3: step 26 in the example above.
The picture runs the two one after the other, so that the forward's result leaves before the backward begins; that
halves it for F = B = W: (p/2-1) max(F, F+B-W) there. Every rank keeps p+1 microbatches, and twice the parameters.
"""

from collections import deque

from megatron_lite.schedules.actions import Action, Placement
from megatron_lite.schedules.sizes import HOW_MANY, RANKS, Sizes, nearest, two_chunk_problems


class _Steps:
    """The list of one rank as it grows; side 0 is its own direction, side 1 the other."""

    def __init__(self, chunks: tuple[int, int], microbatches: tuple[range, range]):
        sides = list(zip(chunks, map(list, microbatches), strict=True))
        self.actions: list[Action] = []
        self.forwards = [deque(Action("F", chunk, number) for number in numbers) for chunk, numbers in sides]
        self.backwards = [deque(Action("BW", chunk, number) for number in numbers) for chunk, numbers in sides]
        self.weights: deque[Action] = deque()

    def forward(self, side: int) -> None:
        self.actions.append(self.forwards[side].popleft())

    def backward(self, side: int, split: bool = False) -> None:
        action = self.backwards[side].popleft()
        self.actions.append(action._replace(kind="B") if split else action)
        if split:
            self.weights.append(action._replace(kind="W"))

    def weight(self) -> None:
        self.actions.append(self.weights.popleft())


def eight_steps(depth: int, position: int, chunks: tuple[int, int], microbatches: tuple[range, range]) -> list[Action]:
    """The steps above for h = `depth`, n = `position`; chunk and microbatches of the own direction come first."""
    rank = _Steps(chunks, microbatches)
    outer, inner, total = depth - position - 1, position + 1, len(microbatches[0])
    for _ in range(2 * outer):
        rank.forward(0)
    for _ in range(inner):
        rank.forward(0)
        rank.forward(1)
    for _ in range(outer):
        rank.backward(1, split=True)
        rank.weight()
        rank.forward(1)
    for _ in range(total - 2 * depth + inner):
        rank.forward(0)
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    for _ in range(outer):
        rank.backward(1)
        rank.forward(1)
        rank.backward(0)
    # The second half of step 6 leaves out its W, which then fills steps 7 and 8. It is the half of 2(n+1) backwards.
    for turn in range(2 * inner):
        rank.backward(1 - turn % 2, split=turn >= inner)
    for _ in range(outer):
        rank.weight()
        rank.backward(0, split=True)
    for _ in range(inner):
        rank.weight()
    return rank.actions


def dualpipe(pp_size: int, pp_rank: int, num_chunks: int, num_microbatches: int) -> list[Action]:
    """The actions of one rank."""
    placement = Placement("bidirectional", pp_size, 2)
    chunks = (0, 1) if pp_rank < pp_size // 2 else (1, 0)
    numbers = [placement.microbatches(chunk, num_microbatches) for chunk in chunks]
    return eight_steps(pp_size // 2, min(pp_rank, pp_size - 1 - pp_rank), chunks, (numbers[0], numbers[1]))


def dualpipe_problems(sizes: Sizes) -> list[str]:
    pp, _, total, _ = sizes
    found = two_chunk_problems(sizes)
    if pp % 2:
        ranks = nearest(pp, lambda size: size % 2 == 0, range(2, pp + 2))
        found.append(f"{RANKS} {pp}: two directions need an even number of pipeline ranks; {ranks} would work")
    if total % 2 or total < 2 * pp:
        totals = nearest(total, lambda size: size % 2 == 0 and size >= 2 * pp, range(2 * pp, 2 * pp + total + 2))
        found.append(f"{total} {HOW_MANY}: two directions need an even number, at least 2 x {pp} ranks; {totals} would work")
    return found
