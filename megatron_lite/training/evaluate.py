"""Validation loss: the mean over all unmasked tokens of the same samples of a set, every time."""

from __future__ import annotations

from collections.abc import Callable

from megatron_lite.data.loader import BatchLoader
from megatron_lite.training.setup import Trainer
from megatron_lite.training.step import total, with_keys


def evaluate(trainer: Trainer, loader: BatchLoader, batches: int, interrupted: Callable[[], bool]) -> float | None:
    """Mean loss over the loader's first `batches` global batches, on every rank. Training state and data position are not
    touched; the loader is closed.

    None if `interrupted`, which all ranks answer alike, says before a batch that the run has to end.
    """
    loss, tokens = 0.0, 0
    try:
        for _ in range(batches):
            if interrupted():
                return None
            microbatches = with_keys(loader.next_step(), trainer.mesh, trainer.config.train.seed, None)
            result = trainer.executor.evaluate(trainer.actions_for(len(microbatches)), microbatches)
            batch_loss, batch_tokens = total(result, trainer.mesh)
            loss, tokens = loss + float(batch_loss), tokens + int(batch_tokens)
    finally:
        loader.close()
    return loss / tokens
