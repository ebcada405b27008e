"""What a byte budget sends first, and how long the rest waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from thermocline.publishing.selection import RowAges, SendBudget, choose, waiting_ages
from thermocline.rows.change_bitmap import UpdateCounts
from thermocline.serve.publishing.staleness import PublishAge


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def whole(bytes_K, error_K, age_K, available, first_K=None, small_K=None):
    """`choose` for rows that have no steps."""
    none_K = np.zeros(len(bytes_K), np.bool_)
    given = (none_K if each is None else each for each in (first_K, small_K))
    return choose(bytes_K, next(given), error_K.astype(np.float32), age_K, next(given), available)


@given(st.integers(0, 70), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_a_choice_fits_the_bytes_and_prefers_large_errors(rows, available, seed):
    draw = np.random.default_rng(seed)
    bytes_K, error_K = draw.integers(1, 90, rows), draw.integers(1, 255, rows)
    age_K, small_K = draw.random(rows) * 50, draw.random(rows) < 0.5
    for small in (None, small_K):
        chosen_K = whole(bytes_K, error_K, age_K, available, small_K=small)
        assert bytes_K[chosen_K].sum() <= available or (chosen_K.all() and bytes_K.sum() <= available)
    equal_K = whole(np.full(rows, 10), error_K, np.zeros(rows), available)
    if 0 < equal_K.sum() < rows and available >= 40:
        by_error = np.argsort(-error_K, kind="stable")[: int(0.75 * available) // 10]
        assert equal_K[by_error].sum() >= len(by_error) - int(0.25 * available) // 10
    waiting = waiting_ages(error_K, age_K, chosen_K)
    assert len(waiting) <= 16 and sum(share for _, share in waiting) <= 1 + 1e-9
    assert bool(waiting) == (not chosen_K.all())


def test_rows_of_other_ids_are_sent_whatever_the_bytes():
    first_K = np.array([False, True, False, True, False])
    for available, expected in ((-5.0, [1, 3]), (20.0, [1, 3]), (34.0, [1, 2, 3])):
        chosen_K = whole(np.full(5, 10), np.array([3, 9, 254, 0, 1]), np.zeros(5), available, first_K)
        assert chosen_K.nonzero()[0].tolist() == expected


def test_counts_stop_below_the_mark_of_rows_that_go_first():
    counts, rows = UpdateCounts(9, torch.device("cpu")), torch.tensor([1, 4, 4])
    counts.publish_first(torch.tensor([7]))
    for _ in range(300):
        counts.mark(torch.cat([rows, torch.tensor([7])]))
    assert counts.counts_R[:9].tolist() == [0, 254, 0, 0, 254, 0, 0, 255, 0]
    assert counts.changed().tolist() == [1, 4, 7]


def test_every_row_is_sent_within_the_stated_bound():
    clock, rows, size = Clock(), 1000, 68
    budget, ages = SendBudget(6800.0, clock), RowAges(rows, clock)  # 100 rows a second, 25 of them the oldest
    counts, sent_at, changed_at = np.zeros(rows, np.uint8), np.zeros(rows), np.full(rows, np.nan)
    draw, longest = np.random.default_rng(0), 0.0
    hot = np.arange(150)
    for _ in range(600):
        clock.now += 0.25
        touched = np.unique(np.concatenate([draw.choice(hot, 100), draw.integers(0, rows, 5)]))
        counts[touched] = np.minimum(counts[touched], 254) + 1
        changed_at[touched] = np.where(np.isnan(changed_at[touched]), clock.now, changed_at[touched])
        rows_K = counts.nonzero()[0]
        chosen_K = whole(np.full(len(rows_K), size), counts[rows_K], ages.seconds(rows_K), available := budget.available())
        chosen = rows_K[chosen_K]
        assert len(chosen) * size <= available
        budget.spend(len(chosen) * size)
        ages.forget(chosen)
        longest = max(longest, float((clock.now - changed_at[chosen]).max(initial=0.0)))
        counts[chosen], sent_at[chosen], changed_at[chosen] = 0, clock.now, np.nan
    assert longest <= 4 * rows * size / 6800.0
    assert (clock.now - sent_at[hot]).mean() < 2.0, "hot rows are fresh"


def test_ages_wrap_around_without_a_jump():
    clock = Clock()
    ages = RowAges(3, clock)
    clock.now += 65_530 * 0.25
    assert ages.seconds(np.array([1])).tolist() == [0.0]
    clock.now += 20.0
    assert ages.seconds(np.array([0, 1])).tolist() == [0.0, 20.0]


def test_unspent_bytes_are_kept_for_two_seconds():
    clock = Clock()
    budget = SendBudget(10.0, clock)
    clock.now += 100.0
    assert budget.available() == 20.0
    budget.spend(25.0)
    clock.now += 1.0
    assert budget.available() == pytest.approx(5.0)


def test_staleness_weighs_waiting_rows_by_their_lookups():
    age = PublishAge(0.5, ((10.0, 0.2), (40.0, 0.005)), applied=0.0)
    ages = [age.quantile(share) - age.quantile(0.0) for share in (0.5, 0.9, 0.99, 0.999)]
    assert ages == pytest.approx([0.0, 10.0, 10.0, 40.0], abs=0.1)
