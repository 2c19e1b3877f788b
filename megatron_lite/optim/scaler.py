"""The loss scale of fp16: gradients are multiplied by it before they could vanish, and divided by it before they are used.

    step with finite gradients      clean + 1; after `loss_scale_window` of them in a row  scale x 2, hysteresis as new
    overflow (inf or NaN)           clean = 0, hysteresis - 1; once that is used up        scale / 2, not below the minimum

Between two overflows hysteresis does not recover: that takes a whole window, as in Megatron's DynamicGradScaler. The state
is three numbers, a function of the one before and of `found_inf`, which all ranks take from the same norm. A constant
scale (--loss-scale, and 1 outside fp16) is a state that stays.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from megatron_lite.config import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5


@dataclass(frozen=True)
class LossScale:
    """The scale of the next step, finite steps since the last change or overflow, overflows that are still forgiven."""

    scale: float = 1.0
    clean: int = 0
    hysteresis: int = 1


@dataclass(frozen=True)
class LossScaler:
    """What moves the scale; `dynamic` False: nothing does."""

    dynamic: bool
    initial: float = 1.0
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 1

    @classmethod
    def of(cls, config: PrecisionConfig) -> LossScaler:
        if not config.fp16:
            return cls(False)
        if config.loss_scale is not None:
            return cls(False, config.loss_scale)
        return cls(True, config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window, config.hysteresis)

    def start(self) -> LossScale:
        return LossScale(self.initial, 0, self.hysteresis)

    def after(self, state: LossScale, found_inf: bool) -> LossScale:
        """The state after a step whose gradients were (found_inf) or were not finite throughout."""
        if not self.dynamic:
            return state
        if found_inf:
            hysteresis = state.hysteresis - 1
            scale = state.scale if hysteresis > 0 else max(state.scale * BACKOFF, self.minimum)
            return LossScale(scale, 0, hysteresis)
        if state.clean + 1 < self.window:
            return replace(state, clean=state.clean + 1)
        return LossScale(state.scale * GROWTH, 0, self.hysteresis)

    def can_fall(self, state: LossScale) -> bool:
        """Whether a lower scale is still to be tried, so that an overflow is a search and no failure."""
        return self.dynamic and state.scale > self.minimum

    def resume(self, stored: dict | None) -> LossScale:
        """The state that a checkpoint stores; the start where it stores none, or where the scale is now constant."""
        return LossScale(**stored) if self.dynamic and stored else self.start()


def stored(state: LossScale) -> dict[str, float | int]:
    """The state as plain numbers, for the checkpoint."""
    return asdict(state)
