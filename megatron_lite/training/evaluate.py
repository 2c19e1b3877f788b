"""Validation loss: the mean over all unmasked tokens of the same first samples of the validation split, every time."""

from __future__ import annotations

from collections.abc import Callable

from megatron_lite.data.loader import BatchLoader
from megatron_lite.training.setup import Trainer
from megatron_lite.training.step import total, with_keys


def evaluate(trainer: Trainer, make_loader: Callable[[], BatchLoader], batches: int,
             interrupted: Callable[[], bool]) -> float | None:  # fmt: skip
    """Mean loss over `batches` global batches, on every rank. Training state and data position are not touched.

    None if `interrupted`, which all ranks answer alike, says before a batch that the run has to end.
    """
    loss, tokens = 0.0, 0
    loader = make_loader()  # starts at sample 0, so that every evaluation scores the same text
    try:
        for _ in range(batches):
            if interrupted():
                return None
            microbatches = with_keys(loader.next_step(), trainer.mesh, trainer.config.train.seed, None)
            result = trainer.executor.evaluate(trainer.actions, microbatches)
            batch_loss, batch_tokens = total(result, trainer.mesh)
            loss, tokens = loss + float(batch_loss), tokens + int(batch_tokens)
    finally:
        loader.close()
    return loss / tokens
