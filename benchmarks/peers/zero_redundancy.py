"""DistributedDataParallel with torch's ZeroRedundancyOptimizer: each rank keeps the AdamW state of its share of parameters."""

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.peers.ddp import DataParallelLoop
from benchmarks.peers.spec import BETAS, EPS, LR, Spec


def build(spec: Spec) -> DataParallelLoop:
    """One rank of the data-parallel pair; the plain loop's groups with another owner of the state."""
    spec.init_process_group()
    loop = DataParallelLoop(spec)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in loop.optimizer.param_groups]
    loop.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, parameters_as_bucket_view=False, lr=LR, betas=BETAS,
                                             eps=EPS, fused=True)  # fmt: skip
    return loop
