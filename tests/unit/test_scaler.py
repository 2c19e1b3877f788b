"""The loss scale against a table worked by hand, and against the rules of the flags."""

import pytest

from megatron_lite.config import PrecisionConfig
from megatron_lite.optim.scaler import LossScale, LossScaler, stored

DYNAMIC = LossScaler(True, initial=64.0, minimum=8.0, window=3, hysteresis=2)

# overflow? -> scale, finite steps in a row, forgiven overflows left: window 3, hysteresis 2, minimum 8, from 64
WORKED = [
    (False, 64, 1, 2),
    (False, 64, 2, 2),
    (True, 64, 0, 1),  # forgiven, but the window starts again
    (False, 64, 1, 1),
    (False, 64, 2, 1),
    (True, 32, 0, 0),  # not forgiven: finite steps between did not renew hysteresis
    (True, 16, 0, -1),  # each one halves from here on
    (False, 16, 1, -1),
    (False, 16, 2, -1),
    (False, 32, 0, 2),  # a whole window: doubled, and hysteresis renewed
    (False, 32, 1, 2),
    (True, 32, 0, 1),
    (True, 16, 0, 0),
    (True, 8, 0, -1),
    (True, 8, 0, -2),  # the minimum
    (True, 8, 0, -3),
    (False, 8, 1, -3),
    (False, 8, 2, -3),
    (False, 16, 0, 2),
]


def test_worked_by_hand():
    state = DYNAMIC.start()
    assert state == LossScale(64.0, 0, 2)
    for number, (overflow, *expected) in enumerate(WORKED):
        state = DYNAMIC.after(state, overflow)
        assert state == LossScale(*expected), f"step {number}"


@pytest.mark.parametrize("at", range(len(WORKED)))
def test_a_stored_state_goes_on_alike(at):
    state = LossScale(*WORKED[at][1:])
    resumed = DYNAMIC.resume(stored(state))
    for overflow, *_ in WORKED[at + 1 :]:
        state, resumed = DYNAMIC.after(state, overflow), DYNAMIC.after(resumed, overflow)
        assert resumed == state


def test_a_search_ends_at_the_minimum():
    assert DYNAMIC.can_fall(LossScale(16.0, 0, 0)) and not DYNAMIC.can_fall(LossScale(8.0, 0, 0))
    constant = LossScaler.of(PrecisionConfig(fp16=True, loss_scale=128.0))
    assert constant.start().scale == 128.0 and not constant.can_fall(constant.start())
    assert constant.after(constant.start(), True) == constant.start() == constant.after(constant.start(), False)


def test_megatrons_defaults():
    scaler = LossScaler.of(PrecisionConfig(fp16=True))
    assert scaler == LossScaler(True, 2.0**32, 1.0, 1000, 2)
    for config in (PrecisionConfig(), PrecisionConfig(bf16=True), PrecisionConfig(fp64=True)):
        assert LossScaler.of(config).start().scale == 1.0 and not LossScaler.of(config).dynamic


def test_what_a_checkpoint_stores_yields_to_the_flags():
    assert DYNAMIC.resume(None) == DYNAMIC.start()  # a checkpoint of another precision, or from before the scale
    constant = LossScaler(False, 128.0)
    assert constant.resume(stored(LossScale(64.0, 1, 2))) == constant.start()
