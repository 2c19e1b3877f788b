"""The training loops a competent user of plain PyTorch writes: autocast, and bf16 weights with fp32 masters."""

import contextlib

import torch
import torch.nn.functional as F

from benchmarks.peers.spec import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Spec


def adamw(parameters) -> torch.optim.AdamW:
    """AdamW with decay on matrices only. Fused is the fastest of torch's three on CPU too."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def token_loss(logits, targets):
    """Mean cross-entropy in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.reshape(-1))


class Masters:
    """fp32 copies of bf16 weights. Each finished gradient is added to its master's at once, in fp32, and freed."""

    def __init__(self, parameters):
        self.weights = [p for p in parameters if p.requires_grad]
        self.masters = [p.detach().clone() for p in self.weights]

    def attach(self) -> None:
        """Round the weights to bf16 and hook their gradients; they must be final (cut, moved) by now."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.data = weight.data.bfloat16()
            master.grad = torch.zeros_like(master)
            weight.register_post_accumulate_grad_hook(self._adder(master))

    @staticmethod
    def _adder(master):
        def add(weight):
            master.grad.add_(weight.grad)
            weight.grad = None

        return add

    @torch.no_grad()
    def write_back(self) -> None:
        """Copy the updated masters into the weights, and clear the gradients."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)
            master.grad.zero_()


class Loop:
    """Accumulate microbatches, clip, step. `loss_of(tokens, targets)` is the mean loss of one microbatch."""

    def __init__(self, spec: Spec, loss_of, parameters, masters: Masters | None = None):
        self.spec, self.loss_of, self.masters = spec, loss_of, masters
        self.trained = masters.masters if masters else [p for p in parameters if p.requires_grad]
        self.optimizer = adamw(self.trained)
        self.autocast = spec.dtype == "bf16" and masters is None
        self.done = 0

    def rows(self, batch):
        """The rows of the global batch this rank trains on."""
        return batch

    def microbatch_context(self, last: bool):
        """Around one microbatch's forward and backward."""
        return contextlib.nullcontext()

    def reduce_loss(self, loss):
        """Make the loss that of the global batch."""
        return loss

    def step(self, batch) -> tuple[float, float]:
        """One optimizer step over the global batch."""
        micros = self.rows(batch).split(self.spec.micro_batch)
        total = torch.zeros(())
        for i, micro in enumerate(micros):
            with self.microbatch_context(last=i == len(micros) - 1):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.loss_of(micro[:, :-1], micro[:, 1:]) / len(micros)
                loss.backward()
            total += plain_tensor(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.step()
        if self.masters:
            self.masters.write_back()
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return self.reduce_loss(total).item(), plain_tensor(norm).item()

    def run_steps(self, steps: int) -> dict:
        """Run steps on the next batches of the stream."""
        losses, norms = [], []
        for _ in range(steps):
            loss, norm = self.step(self.spec.batch(self.done))
            self.done += 1
            losses.append(loss)
            norms.append(norm)
        return {"losses": losses, "norms": norms}


def plain_tensor(value):
    """A DTensor's full value; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value
