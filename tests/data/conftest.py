"""What the tests of sample orders share."""

import pytest

from megatron_lite.data.loader import BatchLoader
from megatron_lite.rampup import BatchSizes


@pytest.fixture
def assert_read_alike():
    """All data-parallel ranks together read the samples of a step of 4 from `consumed` on, whatever the cut."""

    def check(samples, dp, micro, consumed):
        rows = []
        for rank in range(dp):
            loader = BatchLoader(samples, micro_batch_size=micro, batch_sizes=BatchSizes(4), dp_rank=rank, dp_size=dp,
                                 vocab_size=9999, consumed_samples=consumed, prefetch=0)  # fmt: skip
            rows += [row.tolist() for batch in loader.next_step() for row in batch.tokens]
        assert sorted(rows) == sorted(samples[n][:-1].tolist() for n in range(consumed, consumed + 4))

    return check
