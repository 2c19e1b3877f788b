"""AdamW and SGD over flat buckets, with fp32 master weights under bf16 and fp16.

    master  fp32 copy of the bucket's owned parameters (the parameters themselves in fp32 and fp64)
    moments of the master's dtype and layout

Without ZeRO a rank owns the whole bucket, with it a part: the same code on less memory.

Decay touches only matrices (`Shard.decay`), so a bucket is stepped as runs of equal decay. The kernel is chosen here and
nowhere else: apex's FusedAdam on CUDA where it is installed from NVIDIA's source, else torch's fused AdamW.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from megatron_lite.config import OptimizerConfig
from megatron_lite.optim.flat import FlatBucket


@dataclass
class BucketState:
    """Optimizer state of one bucket. `moments` by name, each the shape of `master`."""

    bucket: FlatBucket
    master: torch.Tensor
    moments: dict[str, torch.Tensor]


class Optimizer:
    """Steps every bucket; holds fp32 masters and moments."""

    def __init__(self, buckets: list[FlatBucket], config: OptimizerConfig):
        self.config = config
        self.steps = 0
        names = ("exp_avg", "exp_avg_sq") if config.optimizer == "adam" else ("momentum",)
        self._adam = fused_adamw(buckets[0].param.device)
        self.states = []
        for bucket in buckets:
            low = bucket.param.dtype in (torch.bfloat16, torch.float16)
            master = bucket.param_shard.float() if low else bucket.param_shard
            moments = {name: torch.zeros_like(master) for name in names}
            self.states.append(BucketState(bucket, master, moments))

    def step(self, lr: float, grad_scale: torch.Tensor) -> None:
        """One update with gradients multiplied by `grad_scale` (clip coefficient / (tokens x loss scale), a scalar tensor)."""
        self.steps += 1
        for state in self.states:
            state.bucket.grad_shard.mul_(grad_scale.to(state.bucket.grad_shard.dtype))
        for decays in (True, False):
            self._step_group(lr, self.config.weight_decay if decays else 0.0, decays)
        self.write_back()

    def _step_group(self, lr: float, weight_decay: float, decays: bool) -> None:
        """One fused call over all runs of one decay group."""
        picked = [(state, slice(a, b)) for state in self.states for a, b, d in step_runs(state.bucket) if d == decays]
        if not picked:
            return
        params = [state.master[place] for state, place in picked]
        grads = [state.bucket.grad_shard[place] for state, place in picked]
        moments = {name: [state.moments[name][place] for state, place in picked] for name in self.states[0].moments}
        if self.config.optimizer == "adam":
            self._adam(params, grads, moments["exp_avg"], moments["exp_avg_sq"], self.steps, lr, weight_decay, self.config)
        else:
            for param in params:  # decoupled, as for AdamW
                param.mul_(1.0 - lr * weight_decay)
            sgd(params, grads, moments["momentum"], weight_decay=0.0, momentum=self.config.sgd_momentum, lr=lr, dampening=0.0,
                nesterov=False, maximize=False, foreach=True)  # fmt: skip

    def bytes(self) -> dict[str, int]:
        """Bytes this rank holds for masters (where they are separate) and moments."""
        return {"master": sum(s.master.nbytes for s in self.states if s.master is not s.bucket.param_shard),
                "moments": sum(m.nbytes for s in self.states for m in s.moments.values())}  # fmt: skip

    def write_back(self) -> None:
        """Parameters from the masters, after a step or after a checkpoint was loaded into them."""
        for state in self.states:
            if state.master is not state.bucket.param_shard:
                state.bucket.param_shard.copy_(state.master)


def step_runs(bucket: FlatBucket) -> list[tuple[int, int, bool]]:
    """What this rank steps: neighbouring runs [start, end) of its part, and whether they decay. Frozen parameters are in
    none; alignment gaps go with the parameter before them."""
    found: list[tuple[int, int, bool]] = []
    ends = [slot.start for slot in bucket.layout.slots[1:]] + [bucket.layout.size]
    for (slot, param), end in zip(bucket.slots(), ends, strict=True):
        part = bucket.owned_part(slot.start, end)
        if part is None or not param.requires_grad:
            continue
        start, decays = part[0], param.shard.decay
        if found and found[-1][1:] == (start, decays):
            start = found.pop()[0]
        found.append((start, part[1], decays))
    return found


# ---------------------------------------------------------------------------------------------------------------------
# AdamW kernels: (params, grads, exp_avgs, exp_avg_sqs, step from 1, lr, weight decay, config), lists of flat tensors


def fused_adamw(device: torch.device) -> Callable[..., None]:
    """The fastest AdamW there is on `device`."""
    if device.type == "cuda":
        try:
            import amp_C  # NVIDIA apex's compiled kernels; the PyPI package named apex has none
            from apex.multi_tensor_apply import multi_tensor_applier
        except ImportError:
            return _torch_adamw
        return _apex_adamw(amp_C.multi_tensor_adam, multi_tensor_applier, torch.zeros(1, dtype=torch.int, device=device))
    return _torch_adamw


def _torch_adamw(params, grads, exp_avgs, exp_avg_sqs, step, lr, weight_decay, config: OptimizerConfig) -> None:
    counts = [torch.full((), step - 1.0, device=p.device) for p in params]  # the kernel adds one to each
    adamw(params, grads, exp_avgs, exp_avg_sqs, [], counts, fused=True, amsgrad=False, beta1=config.adam_beta1,
          beta2=config.adam_beta2, lr=lr, weight_decay=weight_decay, eps=config.adam_eps, maximize=False)  # fmt: skip


def _apex_adamw(kernel, apply, overflow: torch.Tensor) -> Callable[..., None]:
    """What apex's FusedAdam(adam_w_mode=True) launches, without its copies of the state."""
    decoupled, bias_correction = 1, 1

    def step_all(params, grads, exp_avgs, exp_avg_sqs, step, lr, weight_decay, config: OptimizerConfig) -> None:
        apply(kernel, overflow, [grads, params, exp_avgs, exp_avg_sqs], lr, config.adam_beta1, config.adam_beta2,
              config.adam_eps, step, decoupled, bias_correction, weight_decay)  # fmt: skip

    return step_all
