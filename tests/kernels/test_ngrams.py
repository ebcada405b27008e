"""Rows of n-grams: golden values, the map in words, and every implementation against the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import has
from thermocline import BadInput, IdMap, IdOutOfRange
from thermocline.kernels import dispatch
from thermocline.kernels.gpu.errors import error_buffer
from thermocline.kernels.ids.fields import GOLDEN, MIX1, MIX2
from thermocline.kernels.ids.reference import signed
from thermocline.kernels.ngrams import cpu, gpu, reference
from thermocline.nn import NGramHash

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # Triton's interpreter
]

On = Callable[[Any], Any]
WORD = (1 << 64) - 1
HASHES = [
    NGramHash(1000, 50, (2, 3), 3, exclude=(0, 7), salt=3),
    NGramHash(1 << 40, 70_000, (1, 2, 5), 2, salt=-4),
    NGramHash(8, 9, (4,), 8, salt=1 << 70),
    NGramHash(2, 3, (1,), exclude=(1,)),
]


def tokens_of(ngrams: NGramHash, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, min(ngrams.vocabulary, 60), (batch, length), generator=generator)


def arguments(ngrams: NGramHash) -> tuple[Any, ...]:
    return ngrams.orders, ngrams.vocabulary, ngrams.part


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * MIX1) & WORD
    z = ((z ^ (z >> 27)) * MIX2) & WORD
    return z ^ (z >> 31)


def rows_in_words(ngrams: NGramHash, tokens: list[int], at: int) -> list[int]:
    """The documented map in plain Python: the rows of one position."""
    if tokens[at] in ngrams.exclude:
        return [ngrams.slots * ngrams.part] * ngrams.slots
    found = []
    for slot in range(ngrams.slots):
        gram = GOLDEN
        for token in tokens[at::-1][: ngrams.orders[slot // ngrams.heads]]:
            if token in ngrams.exclude:
                break
            gram = mix(((token ^ gram) * GOLDEN) & WORD)
        hashed = IdMap.hashed(ngrams.part, ngrams.salt * 65536 + slot).offset(slot * ngrams.part)
        found.append(int(hashed(torch.tensor([signed(gram)]))))
    return found


def test_golden_rows_never_change():
    ngrams = NGramHash(1_000_000, 50_257, (2, 3), 2, exclude=(50_256,), salt=1)
    begin = [[127745, 293863, 686189, 871803], [16198, 436670, 575878, 792263]]  # also after the separator
    rows_LS = [*begin, [38735, 479600, 512437, 972920], [999996] * 4, *begin]
    assert ngrams(torch.tensor([[11, 12, 13, 50_256, 11, 12]])).tolist() == [rows_LS]
    assert NGramHash(100, 10)(torch.tensor([[1, 2, 3, 4]])).tolist() == [[[40, 71], [2, 56], [11, 99], [38, 74]]]


@pytest.mark.parametrize("ngrams", HASHES, ids=str)
def test_the_definition_is_the_documented_map(ngrams: NGramHash):
    tokens_BL = tokens_of(ngrams, 2, 9)
    rows_BLS = reference.ngram_rows(*ngrams.arrays(), tokens_BL, *arguments(ngrams))
    wanted = [[rows_in_words(ngrams, tokens, at) for at in range(9)] for tokens in tokens_BL.tolist()]
    assert rows_BLS.tolist() == wanted and int(rows_BLS.max()) < ngrams.rows


@pytest.mark.parametrize("ngrams", HASHES, ids=str)
@pytest.mark.parametrize("batch, length", [(0, 7), (1, 5), (3, 63), (2, 2049)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_every_implementation_gives_the_rows_of_the_reference(ngrams, batch, length, dtype, on: On):
    tokens_BL = tokens_of(ngrams, batch, length).to(dtype)
    wanted_BLS = reference.ngram_rows(*ngrams.arrays(), tokens_BL, *arguments(ngrams))
    assert torch.equal(cpu.ngram_rows(*ngrams.arrays(), tokens_BL, *arguments(ngrams)), wanted_BLS)
    if length < 100:
        made_BLS = gpu.ngram_rows(*on(ngrams.arrays()), on(tokens_BL), *arguments(ngrams))
        assert torch.equal(made_BLS.cpu(), wanted_BLS)


@pytest.mark.parametrize("bad", [50, -1, -100, 1 << 40])
def test_a_token_outside_the_vocabulary_raises_everywhere(bad: int, on: On):
    ngrams = HASHES[0]
    tokens_BL = tokens_of(ngrams, 3, 5).remainder(ngrams.vocabulary)
    tokens_BL[1, 2] = bad
    for module in (reference, cpu):
        with pytest.raises(IdOutOfRange, check=has(position=7, id=bad, rows=50, name="tokens")):
            module.ngram_rows(*ngrams.arrays(), tokens_BL, *arguments(ngrams))
    keys_S, excluded_X = on(ngrams.arrays())
    rows_BLS = gpu.ngram_rows(keys_S, excluded_X, on(tokens_BL), *arguments(ngrams))
    assert int(rows_BLS.min()) >= 0 and int(rows_BLS.max()) < ngrams.rows
    with pytest.raises(IdOutOfRange, check=has(position=7, id=bad, rows=50)):
        error_buffer(keys_S).raise_pending()


@pytest.mark.parametrize(
    "tokens, fields",
    [
        (torch.zeros(2, 3), {"parameter": "tokens", "value": torch.float32}),
        (torch.zeros(3, dtype=torch.int64), {"parameter": "tokens", "value": 1}),
        (torch.zeros(2, 2, dtype=torch.int64), {"parameter": "tokens", "value": 2, "needed": 3}),
        (torch.zeros(2, 0, dtype=torch.int64), {"parameter": "tokens", "value": 0, "needed": 3}),
        (torch.zeros(2, 3, dtype=torch.int64, device="meta"), {"parameter": "tokens", "value": torch.device("meta")}),
    ],
)
def test_tokens_of_another_form_are_refused(tokens: torch.Tensor, fields: dict[str, Any]):
    with pytest.raises(BadInput, check=has(**fields)):
        dispatch.ngram_rows(*HASHES[0].arrays(), tokens, *arguments(HASHES[0]))


def test_the_operator_passes_opcheck():
    ngrams = HASHES[0]
    args = (*ngrams.arrays(), tokens_of(ngrams, 2, 5).remainder(50), list(ngrams.orders), 50, ngrams.part, reference.VERSION)
    torch.library.opcheck(torch.ops.thermocline.ngram_rows.default, args)
