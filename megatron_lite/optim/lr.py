"""The learning rate as a pure function of progress. Units of progress are samples, as in Megatron: a step adds the
global batch size, and lengths given in iterations are multiplied by it."""

from __future__ import annotations

import math

from megatron_lite.config import OptimizerConfig, TrainConfig


def lengths(config: OptimizerConfig, train: TrainConfig) -> tuple[float, float, float]:
    """(warm-up, decay, WSD's final decay) in samples."""
    batch = train.global_batch_size
    total = train.train_samples if train.train_samples is not None else train.train_iters * batch
    if config.lr_decay_samples is not None:
        total = config.lr_decay_samples
    elif config.lr_decay_iters is not None:
        total = config.lr_decay_iters * batch
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * total
    else:
        warmup = config.lr_warmup_samples or config.lr_warmup_iters * batch
    wsd = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * batch
    return float(warmup), float(total), float(wsd)


def learning_rate(samples: int, config: OptimizerConfig, train: TrainConfig) -> float:
    """Rate of the step that begins after `samples` consumed samples (so the first step of a warm-up has the initial
    rate, as in Megatron)."""
    warmup, total, wsd = lengths(config, train)
    if warmup > 0 and samples <= warmup:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * samples / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if config.lr_decay_style == "inverse-square-root":
        return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1.0)) / math.sqrt(max(samples, 1.0)))
    if samples >= total:
        return config.min_lr
    x = (samples - warmup) / (total - warmup)
    if config.lr_decay_style == "WSD":
        start = total - wsd
        if samples <= start:
            return config.lr
        share = _wsd((samples - start) / wsd, config.lr_wsd_decay_style)
    else:
        share = 1.0 - x if config.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))
    return config.min_lr + (config.lr - config.min_lr) * share


def _wsd(x: float, style: str) -> float:
    """Share of the rate left at x in [0, 1] of the final decay."""
    if style == "linear":
        return 1.0 - x
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * x))
    if style == "exponential":
        return 2.0 * 0.5**x - 1.0
    return 1.0 - math.sqrt(x)
