"""Figures of the speed table (benchmarks/report.py): ratios are taken inside a round, and nothing is lost when one is missing."""

import math

import pytest

from benchmarks import report


def turns(*rates):
    """Rounds of 100 tokens at these rates."""
    return [{"tokens": 100, "seconds": 100 / rate} for rate in rates]


def test_mfu_is_the_median_of_ratios_inside_a_round():
    """A machine that is three times as fast in one round changes nothing; best rates against medians would."""
    found = report.utilisation(turns(10, 30, 8), 1e9, [{"all": 20.0}, {"all": 60.0}, {"all": 20.0}])
    assert found["gflops"] == pytest.approx(10.0) and found["mfu_percent"] == pytest.approx(50.0)


def test_a_table_without_the_matrix_products():
    row = report.summary([turn | {"cpu_seconds": 1, "peak_rss_mb": 1, "minor_faults": 0, "losses": [1.0], "norms": [1.0]}
                          for turn in turns(10, 20, 30)], {"seconds": 1, "losses": [], "norms": []}, 1)  # fmt: skip
    row |= report.utilisation(turns(10, 20, 30), 1e9, [])
    assert math.isnan(row["mfu_percent"])
    row |= {"over_baseline": 1.0, "loss_difference": 0.0, "norm_difference": 0.0}
    text = report.block_text({"group": "single", "dtype": "fp32", "world": 1, "threads": 1, "micro_batch": 1, "global_batch": 1,
                              "baseline": "ours", "reference": None, "ceiling": [], "rows": {"ours": row},
                              "failed": {"matrix products": "no memory"}, "ratios": {}})  # fmt: skip
    assert "not measured" in text and "left out: matrix products: no memory" in text and " 20 " in text
