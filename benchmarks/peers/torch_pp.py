"""torch.distributed.pipelining: its schedules over stages of the plain model, two ranks.

Options: split (layers of each stage), schedule (our name of it), masters (bf16 weights with fp32 masters; else autocast).
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

from benchmarks.peers.loops import Loop, Masters, token_loss
from benchmarks.peers.plain import load_plain
from benchmarks.peers.spec import CLIP, Spec

SCHEDULES = {  # our name -> (torch's class, stages per rank, whether they lie in a V)
    "gpipe": ("ScheduleGPipe", 1, False),
    "1f1b": ("Schedule1F1B", 1, False),
    "interleaved": ("ScheduleInterleaved1F1B", 2, False),
    "interleaved-zb": ("ScheduleInterleavedZeroBubble", 2, False),
    "zbv": ("ScheduleZBVZeroBubble", 2, True),
    "dualpipev": ("ScheduleDualPipeV", 2, True),
}


def stages_of(name: str, ranks: int, rank: int) -> list[int]:
    """The stages of a rank under a schedule."""
    _, per_rank, folded = SCHEDULES[name]
    return [rank, 2 * ranks - 1 - rank] if folded else [rank + turn * ranks for turn in range(per_rank)]


class PipelineLoop(Loop):
    """One rank's stages; the schedule runs the microbatches, this class the optimizer."""

    def __init__(self, spec: Spec):
        split, name = spec.options["split"], spec.options.get("schedule", "1f1b")
        made, per_rank, _ = SCHEDULES[name]
        total = spec.world * per_rank
        if sum(split) != spec.shape.layers or len(split) != total:
            raise ValueError(f"split {split} does not cut {spec.shape.layers} layers into {total} stages")
        numbers = stages_of(name, spec.world, spec.rank)
        models = [load_plain(spec, range(sum(split[:n]), sum(split[: n + 1]))) for n in numbers]
        parameters = nn.ModuleList(models).parameters()
        masters = None
        if spec.options.get("masters"):
            masters = Masters(parameters)
            masters.attach()
        super().__init__(spec, None, nn.ModuleList(models).parameters(), masters)
        self.first, self.last = 0 in numbers, total - 1 in numbers
        count = spec.global_batch // spec.micro_batch
        stages = [pipelining.PipelineStage(m, n, total, torch.device("cpu")) for m, n in zip(models, numbers, strict=True)]
        # The loss is divided here, not by the schedule, whose scale_grads would find the masters' gradients gone.
        options = {"loss_fn": lambda x, y: token_loss(x, y) / count, "scale_grads": False}
        self.schedule = getattr(pipelining, made)(stages if per_rank > 1 else stages[0], count, **options)

    def step(self, batch) -> tuple[float, float]:
        """One optimizer step over the global batch."""
        losses = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            inputs = (batch[:, :-1].contiguous(),) if self.first else ()
            targets = {"target": batch[:, 1:].contiguous(), "losses": losses} if self.last else {}
            self.schedule.step(*inputs, **targets, return_outputs=False)
        local = torch.nn.utils.get_total_norm([p.grad for p in self.trained])
        sums = torch.stack([local.square(), torch.stack(losses).sum().detach() if self.last else torch.zeros(())])
        dist.all_reduce(sums)
        norm = sums[0].sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.trained, CLIP, norm)
        self.optimizer.step()
        if self.masters:
            self.masters.write_back()
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return sums[1].item(), norm.item()


def build(spec: Spec) -> PipelineLoop:
    """One rank of the pipeline."""
    spec.init_process_group()
    return PipelineLoop(spec)
