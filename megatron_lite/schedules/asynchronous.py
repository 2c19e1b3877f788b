"""Asynchronous pipelines: no flush between optimizer steps, so no bubble, and gradients of weights that are no longer new.

A synchronous schedule empties the pipeline before every update. Here the stream of microbatches runs on through the updates:
the actions of a rank are 1F1B's over all microbatches between two drains, and its weights change in the middle of it, after
the last backward of every global batch (m microbatches). With p ranks, rank r runs p-1-r backwards between the forward and
the backward of a microbatch. The rules differ in which weights, numbered by the updates made before, an action uses:

    microbatch j (iteration t = j // m)   forward                        backward           versions that rank r keeps
    pipedream                             newest: max(0, j-(p-1-r))//m   of its forward     ceil((p-1-r) / m) + 1
    pipedream-2bw                         max(0, t-1)                    of its forward     2
    pipemare                              newest, as pipedream           newest: t          1

pipedream (Narayanan et al., 2019): weight stashing. With m = 1 the gradient of rank r is p-1-r updates old and it keeps
p-r versions: w(t+1) = w(t) - lr grad f(w_0(t-p+1), w_1(t-p+2), ..., w_{p-1}(t)). The paper updates after every microbatch,
which is m = 1; with m > 1 a global batch is still one update, as everywhere here, and delays shrink to (p-1-r)/m on average.

pipedream-2bw (Narayanan et al., 2021): w(t+1) = w(t) - lr grad f(w(t-1)) on every rank, m >= p. The previous version is what
all ranks have when iteration t begins; the delay is one update everywhere, the last rank included.

pipemare (Yang et al., 2021): nothing is stashed; the backward uses other weights than the forward did. Two remedies:
    T1  rank r learns at lr / max(1, tau)^(1 - min(k/K, 1)) in update k, with tau its delay in updates
    T2  its backward uses u = w - lag * delta, an estimate of the forward's weights: lag is the number of updates since them,
        delta = gamma * delta + (1 - gamma) * (w_new - w_old) the mean change of an update, gamma = D^(1/tau)
The paper's pipeline runs a forward and a backward of different microbatches per slot, hence its tau = (2(p-r)-1)/m; 1F1B runs
them in turn, and in it the delay is (p-1-r)/m. It is this pipeline's own delay that T1 and T2 use.

Versions on 3 ranks, one microbatch per update (F4@1: microbatch 4 at the weights of one update; | an update):

    pipedream   F0@0 F1@0 F2@0 BW0@0 | F3@1 BW1@0 | F4@2 BW2@0 | BW3@1 | BW4@2 |
                F0@0 F1@0 BW0@0 | F2@1 BW1@0 | F3@2 BW2@1 | F4@3 BW3@2 | BW4@3 |
                F0@0 BW0@0 | F1@1 BW1@1 | F2@2 BW2@2 | F3@3 BW3@3 | F4@4 BW4@4 |
    pipemare    F0@0 F1@0 F2@0 BW0@0 | F3@1 BW1@1 | F4@2 BW2@2 | BW3@3 | BW4@4 |
                F0@0 F1@0 BW0@0 | F2@1 BW1@1 | F3@2 BW2@2 | F4@3 BW3@3 | BW4@4 |
                F0@0 BW0@0 | F1@1 BW1@1 | F2@2 BW2@2 | F3@3 BW3@3 | F4@4 BW4@4 |

After a drain all versions are equal and the pipeline fills again, so the first delays of a window are shorter.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.schedules.actions import Action
from megatron_lite.schedules.sizes import HOW_MANY, Sizes, one_chunk_problems


class Use(NamedTuple):
    """The weights of one action. `version`: updates made before them since the drain. `lag`: so many updates newer than
    the weights of its forward. `update`: an optimizer step follows."""

    action: Action
    version: int
    lag: int
    update: bool


def two_buffer_problems(sizes: Sizes) -> list[str]:
    """Two versions suffice only if the update before last is done on every rank when an iteration begins."""
    found = one_chunk_problems(sizes)
    if sizes.num_microbatches < sizes.pp_size:
        found.append(f"{sizes.num_microbatches} {HOW_MANY}: two versions of the weights need at least one per pipeline rank; "
                     f"{sizes.pp_size} would work")  # fmt: skip
    return found


def weight_uses(rule: str, actions: Sequence[Action], microbatches: int) -> list[Use]:
    """Which weights each of a rank's `actions` uses, and where it updates them: after every `microbatches`-th backward.

    `actions` begin and end with an empty pipeline. Backwards run in microbatch order (1F1B's do), so that each update
    takes one iteration's gradients and no other's.
    """
    uses, of_forward, newest, backwards = [], {}, 0, 0
    for action in actions:
        j = action.microbatch
        if action.kind == "F":
            of_forward[j] = max(0, j // microbatches - 1) if rule == "pipedream-2bw" else newest
            uses.append(Use(action, of_forward[j], 0, False))
            continue
        forward = of_forward.pop(j)
        version = newest if rule == "pipemare" else forward
        backwards += 1
        update = backwards % microbatches == 0
        uses.append(Use(action, version, version - forward, update))
        newest += update
    return uses


def last_uses(uses: Sequence[Use]) -> dict[int, int]:
    """Version -> index of the last action that uses it."""
    return {use.version: index for index, use in enumerate(uses)}


def delay(pp_size: int, pp_rank: int, microbatches: int) -> float:
    """tau: updates between a forward and the backward of the same microbatch, on average once the pipeline is full."""
    return (pp_size - 1 - pp_rank) / microbatches


def most_versions(rule: str, pp_size: int, pp_rank: int, microbatches: int) -> int:
    """Weight versions that a rank keeps at once, the newest included."""
    if rule == "pipemare":
        return 1
    if rule == "pipedream-2bw":
        return 2
    return -(-(pp_size - 1 - pp_rank) // microbatches) + 1


def weights_text(rule: str, actions: Sequence[Action], microbatches: int) -> str:
    """A rank's actions with the version of the weights of each: `F4@1` is the forward of microbatch 4 at the weights made
    by one update; `|` is an update."""
    words = []
    for use in weight_uses(rule, actions, microbatches):
        words += [f"{use.action}@{use.version}", *(["|"] if use.update else [])]
    return " ".join(words)


def annealed(lr: float, tau: float, update: int, length: int) -> float:
    """PipeMare's T1: lr / tau^(1 - min(update / length, 1)), never above lr; `length` 0 turns it off."""
    power = 1.0 - min(update / length, 1.0) if length else 0.0
    return lr / max(1.0, tau) ** power
