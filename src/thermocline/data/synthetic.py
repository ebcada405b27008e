"""A synthetic click log of any length over any number of rows, with nothing stored and a known truth.

**Ids.** 26 tables with the cardinalities c_1..c_26 of the Criteo Kaggle log (33.8M rows), or with c_t^p rows each, p chosen for
a given total. Rows follow Zipf's law with exponent 1.05 (`zipf.py`).

**Dense features.** 13 counts 0..1023; log(1 + count) is about uniform.

**Labels.** Every row has a bias and four latent coordinates, hashes of (seed, table, row). A row that is drawn h times as often
as the mean row of its table has its bias multiplied by m = 1/h, between 1 and 4, so that cold rows matter too: with 1M samples
over 1M rows, zeroing all but the hottest 11% of rows costs a model 28e-4 of AUC (4e-4 if m were 1). The click probability is

    sigmoid(intercept + sum_t s_t m_t bias_t  +  g sum_{t<u} <v_t, v_u>  +  sum_i w_i (2 quantile_i - 1))

where s_t^2 is proportional to log(rows of t) (2 in all), g gives interactions a deviation of about 0.5, and dense features have
one of 0.5. The intercept gives Criteo's click rate, 0.2562. The AUC of `probability` is the best that any model can reach.

**Reproducible to the bit.** Sample n is a function of (seed, n). All arithmetic is in integers (logits in units of 2^-16,
probabilities of 2^-32), so CPUs and GPUs make the same log; its small tables are computed once in float64 and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from thermocline.errors import BadInput

from .click_files import transform_dense
from .click_log import Clicks, criteo_names, rebatch
from .random_bits import bits, key_of, keys, right
from .zipf import MAX_ROWS, Zipf

CRITEO_ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194,
    27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
DENSE = 13
CLICK_RATE = 0.2562

_BIAS_VARIANCE, _INTERACTION_DEVIATION, _DENSE_VARIANCE = 2.0, 0.5, 0.25
_ONE = 1 << 16  # a logit of 1
_DEVIATION = math.sqrt((256**2 - 1) / 3)  # of 2 * byte - 255, and of half the sum of four such
_COORDINATES = 4
_RARITY_BITS, _RARITY_LIMIT = 4, 4.0  # rarities are in units of 2^-4
_LEVEL_BITS = 10  # of a dense feature
_CHUNK = 1 << 14
_STEP_BITS, _LIMIT = 8, 16 * 256  # the table of probabilities: a step is 2^8 units of a logit, the ends are -16 and 16

# Keys of random bits.
_IDS, _DENSE, _LABEL, _ROW, _WEIGHT, _SHIFT, _CALIBRATE = range(7)


def table_rows(total: int) -> tuple[int, ...]:
    """Cardinalities of the Criteo tables, raised to the power that makes their sum `total`."""
    if total < len(CRITEO_ROWS):
        raise BadInput(f"{total} rows are too few; {len(CRITEO_ROWS)} tables need one each", parameter="rows", value=total)
    low, high = 0.0, 2.0
    for _ in range(60):
        power = (low + high) / 2
        low, high = (power, high) if sum(int(c**power) for c in CRITEO_ROWS) <= total else (low, power)
    rows = [int(c**low) for c in CRITEO_ROWS]
    rows[2] += total - sum(rows)  # the largest
    return tuple(rows)


@dataclass(frozen=True)
class SyntheticLog:
    """Samples `first` to `first + samples` of the log that (`rows`, `seed`, `exponent`) define, made on `device`."""

    rows: tuple[int, ...]
    samples: int
    seed: int = 0
    first: int = 0
    device: str = "cpu"
    exponent: float = 1.05
    dense = DENSE

    @property
    def names(self) -> tuple[str, ...]:
        return criteo_names(len(self.rows))

    def __post_init__(self) -> None:
        if not self.rows or not 1 <= min(self.rows) <= max(self.rows) <= MAX_ROWS:
            raise BadInput(f"tables have {list(self.rows)} rows; use 1 to {MAX_ROWS} for each", parameter="rows")
        if self.device.startswith("cuda") and not torch.cuda.is_available():
            message = f"device is {self.device!r}, but torch finds no CUDA device; use cpu, or run: thermocline doctor"
            raise BadInput(message, parameter="device")
        if self.samples < 0 or self.first < 0:
            raise BadInput(f"samples is {self.samples}, first is {self.first}; use 0 or more", parameter="samples")

    def batches(self, size: int, epoch: int = 0, first: int = 0) -> Iterator[Clicks]:
        # Small batches are cut from chunks: the cost is mostly the number of operations, not their size.
        chunk = size * max(1, _CHUNK // size)
        starts = range(first * size, self.samples, chunk)
        yield from rebatch((self.clicks(start, min(chunk, self.samples - start)) for start in starts), size)

    def clicks(self, start: int, count: int) -> Clicks:
        """Samples `start` to `start + count` of this range."""
        number_B = self._numbers(start, count)
        ids_BF, rarity_BF = self._truth.ids(_IDS, number_B)
        level_BI = self._truth.levels(_DENSE, number_B)
        chance_B = right(bits(key_of(self.seed, _LABEL), number_B), 32)
        label_B = (chance_B < self._truth.probability(self._truth.logit(ids_BF, rarity_BF, level_BI))).float()
        return Clicks(label_B, self._truth.dense_L[level_BI], ids_BF)

    def counts(self, start: int, count: int) -> Tensor:
        """Dense features of the same samples as counts, for a file."""
        return self._truth.count_L[self._truth.levels(_DENSE, self._numbers(start, count))]

    def probability(self, start: int, count: int) -> Tensor:
        """True click probability of the same samples, in fp64."""
        number_B = self._numbers(start, count)
        logit_B = self._truth.logit(*self._truth.ids(_IDS, number_B), self._truth.levels(_DENSE, number_B))
        return self._truth.probability(logit_B).double() / 2**32

    def _numbers(self, start: int, count: int) -> Tensor:
        return torch.arange(self.first + start, self.first + start + count, device=self.device)

    @cached_property
    def _truth(self) -> _Truth:
        return _Truth(self.rows, self.seed, self.exponent, self.device)


class _Truth:
    """The model behind a log: how ids and dense features are drawn, and the labels they give."""

    def __init__(self, rows: tuple[int, ...], seed: int, exponent: float, device: str) -> None:
        tables = range(len(rows))
        self._seed, self._device = seed, device
        self._zipfs = [Zipf(count, exponent, key_of(seed, _SHIFT, t), device) for t, count in enumerate(rows)]
        self._rarities = [torch.tensor(_rarities(zipf), device=device) for zipf in self._zipfs]
        self._row_key_F = torch.tensor([keys(seed, _ROW, t) for t in tables], device=device)
        self._bias_weight_F = torch.tensor(_bias_weights(rows), device=device)
        self._dense_weight_I = torch.tensor(_dense_weights(seed), device=device)
        pairs = math.sqrt(len(rows) * (len(rows) - 1) / 2 * _COORDINATES) * _DEVIATION**2
        self._interaction = round(_INTERACTION_DEVIATION * _ONE / max(pairs, 1.0) * 2**20)
        counts = [int(2 ** (10 * level / 2**_LEVEL_BITS)) - 1 for level in range(1 << _LEVEL_BITS)]
        self.count_L = torch.tensor(counts, device=device)
        self.dense_L = transform_dense(torch.tensor(counts)).to(device)
        chances = [round(2**32 / (1 + math.exp(-(step + 0.5) * 2**_STEP_BITS / _ONE))) for step in range(-_LIMIT, _LIMIT)]
        self._chance_S = torch.tensor(chances, device=device)
        self._intercept = 0
        self._intercept = self._calibrated()

    def ids(self, purpose: int, number_B: Tensor) -> tuple[Tensor, Tensor]:
        """Rows, and the rarity factor of each."""
        key_F = torch.tensor([keys(self._seed, purpose, t) for t in range(len(self._zipfs))], device=self._device)
        drawn_FB = bits(key_F[:, None], number_B)
        rows, bins = zip(*(zipf.draw(drawn_B) for zipf, drawn_B in zip(self._zipfs, drawn_FB, strict=True)), strict=True)
        rarities = [rarity_K[bin_B] for rarity_K, bin_B in zip(self._rarities, bins, strict=True)]
        return torch.stack(rows, dim=1), torch.stack(rarities, dim=1)

    def levels(self, purpose: int, number_B: Tensor) -> Tensor:
        key_I = torch.tensor([keys(self._seed, purpose, i, DENSE) for i in range(DENSE)], device=self._device)
        return right(bits(key_I, number_B[:, None]), 64 - _LEVEL_BITS)

    def logit(self, ids_BF: Tensor, rarity_BF: Tensor, level_BI: Tensor) -> Tensor:
        """Logits in units of 2^-16."""
        bits_BF = bits(self._row_key_F, ids_BF)
        bytes_ = [(bits_BF >> shift) & 255 for shift in range(0, 64, 8)]
        bias_BF = bytes_[0] + bytes_[1] + bytes_[2] + bytes_[3] - 510
        logit_B = (bias_BF * rarity_BF * self._bias_weight_F).sum(1) >> _RARITY_BITS
        twice_B = torch.zeros_like(logit_B)  # the sum over pairs, from the square of the sum
        for byte_BF in bytes_[4 : 4 + _COORDINATES]:
            v_BF = 2 * byte_BF - 255
            twice_B += v_BF.sum(1) ** 2 - (v_BF**2).sum(1)
        logit_B += (twice_B * self._interaction) >> 21
        logit_B += ((2 * level_BI - (1 << _LEVEL_BITS) + 1) * self._dense_weight_I).sum(1)
        return logit_B + self._intercept

    def probability(self, logit_B: Tensor) -> Tensor:
        """Probabilities in units of 2^-32."""
        return self._chance_S[((logit_B >> _STEP_BITS) + _LIMIT).clamp(0, 2 * _LIMIT - 1)]

    def _calibrated(self) -> int:
        """The intercept that gives 16,384 samples outside the log the click rate, by bisection."""
        number_B = torch.arange(1 << 14, device=self._device)
        logit_B = self.logit(*self.ids(_CALIBRATE, number_B), self.levels(_CALIBRATE, number_B))
        low, high = -16 * _ONE, 16 * _ONE
        while high - low > 1:
            middle = (low + high) // 2
            clicks = self.probability(logit_B + middle).sum().item() / 2**32
            low, high = (middle, high) if clicks < CLICK_RATE * len(number_B) else (low, middle)
        return low


def _rarities(zipf: Zipf) -> list[int]:
    """Rarity factor of a row of each bin, in units of 2^-4."""
    return [round(min(max(1 / heat, 1.0), _RARITY_LIMIT) * 2**_RARITY_BITS) for heat in zipf.relative_heat]


def _bias_weights(rows: tuple[int, ...]) -> list[int]:
    """Weight of the bias (deviation 148) of each table."""
    logs = [math.log(count) for count in rows]
    share = _BIAS_VARIANCE / max(sum(logs), 1e-9)
    return [round(math.sqrt(share * log) * _ONE / _DEVIATION) for log in logs]


def _dense_weights(seed: int) -> list[int]:
    """Random weights of dense features, scaled to their variance."""
    raw = [(key_of(seed, _WEIGHT, i) & 0xFFFF) - 0x8000 for i in range(DENSE)]
    scale = math.sqrt(3 * _DENSE_VARIANCE / sum(weight**2 for weight in raw))
    return [round(weight * scale * _ONE / (1 << _LEVEL_BITS)) for weight in raw]
