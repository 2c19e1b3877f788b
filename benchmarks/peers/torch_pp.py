"""torch.distributed.pipelining: Schedule1F1B over two stages of the plain model.

Options: split (layers of each stage), masters (bf16 weights with fp32 masters; otherwise autocast).
"""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.peers.loops import Loop, Masters, token_loss
from benchmarks.peers.plain import load_plain
from benchmarks.peers.spec import CLIP, Spec


class PipelineLoop(Loop):
    """One stage; the schedule runs the microbatches, this class the optimizer."""

    def __init__(self, spec: Spec):
        split = spec.options["split"]
        if sum(split) != spec.shape.layers or len(split) != spec.world:
            raise ValueError(f"split {split} does not cut {spec.shape.layers} layers into {spec.world} stages")
        start = sum(split[: spec.rank])
        model = load_plain(spec, range(start, start + split[spec.rank]))
        masters = None
        if spec.options.get("masters"):
            masters = Masters(model.parameters())
            masters.attach()
        super().__init__(spec, None, model.parameters(), masters)
        self.last = spec.rank == spec.world - 1
        count = spec.global_batch // spec.micro_batch
        stage = PipelineStage(model, spec.rank, spec.world, torch.device("cpu"))
        # The loss is divided here, not by the schedule, whose scale_grads would find the masters' gradients gone.
        self.schedule = Schedule1F1B(stage, count, loss_fn=lambda x, y: token_loss(x, y) / count, scale_grads=False)

    def step(self, batch) -> tuple[float, float]:
        """One optimizer step over the global batch."""
        losses = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            if self.spec.rank == 0:
                self.schedule.step(batch[:, :-1].contiguous(), return_outputs=False)
            else:
                self.schedule.step(target=batch[:, 1:].contiguous(), losses=losses, return_outputs=False)
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
    """One stage of the pipeline."""
    spec.init_process_group()
    return PipelineLoop(spec)
