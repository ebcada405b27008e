"""Random single tables against torch's: shapes, types, inputs, optimizers, several lookups a pass, accumulation, copies."""

from __future__ import annotations

import copy
import io
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import thermocline as tc

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
DIMS = (1, 2, 3, 5, 8, 17, 31, 64, 127, 129, 256, 513)
TOLERANCES = {torch.bfloat16: 2e-2, torch.float16: 4e-3}
OPTIMIZERS = {
    "SGD": (tc.SGD(lr=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "Adagrad": (tc.Adagrad(lr=0.1, eps=1e-3), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3)),
}


class Case:
    """One table of ours and one of torch's, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        torch.manual_seed(seed)
        torch.set_default_dtype(draw.choice(DTYPES))
        self.rows, dim = draw.choice((1, 2, 7, 63, 1000)), draw.choice(DIMS)
        self.mode = draw.choice(("none", "sum", "mean", "max"))
        self.last = draw.random() < 0.3
        padding = draw.choice((None, None, 0, -1))
        ours, theirs = OPTIMIZERS[draw.choice(list(OPTIMIZERS))]
        self.update = draw.choice(("backward", "step"))
        self.dtype = draw.choice((torch.get_default_dtype(), *DTYPES))
        rows = tc.RowConfig("fp32", optimizer=ours, update=self.update, residency=draw.choice(("device", "host")))
        bag = {} if self.mode == "none" else {"mode": self.mode, "include_last_offset": self.last}
        kind = "Embedding" if self.mode == "none" else "EmbeddingBag"
        self.ours = getattr(tc, kind)(self.rows, dim, padding_idx=padding, rows=rows, dtype=self.dtype, **bag)
        self.theirs = getattr(nn, kind)(self.rows, dim, padding_idx=padding, dtype=torch.float32, **bag)
        self.theirs.weight.data.copy_(self.ours.get_rows(torch.arange(self.rows)))
        self.optimizer = theirs(self.theirs.parameters())
        self.tolerance = TOLERANCES.get(self.dtype, 1e-5)

    def input(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arguments of ours, and the same for torch."""
        draw, kind = self.draw, self.draw.choice((torch.int64, torch.int32))
        form = draw.choice(("2-D", "transposed", "strided", "flat", "flat", "nested"))
        batch, length = draw.choice((0, 1, 2, 33)), draw.choice((1, 2, 17))
        if form in ("flat", "nested") and (self.mode != "none" or (form == "nested" and batch)):
            lengths = torch.tensor([draw.choice((0, 0, 1, 9)) for _ in range(max(1, batch))])
            ends, ids = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]), self.ids((int(lengths.sum()),))
            theirs = (ids,) if self.mode == "none" else (ids, ends if self.last else ends[:-1])
            if form == "nested":
                return (torch.nested.nested_tensor_from_jagged(ids.to(kind), ends),), theirs
            return tuple(each.to(kind) for each in theirs), theirs
        ids = self.ids((batch, length) if form != "strided" else (batch, 2 * length))
        ids = ids.to(kind)[:, ::2] if form == "strided" else ids.to(kind)
        ids = ids.t().contiguous().t() if form == "transposed" else ids
        return (ids,), (ids.long(),)

    def ids(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(self.rows, shape)

    def losses(self) -> tuple[Tensor, Tensor]:
        """The loss of one lookup, ours and torch's."""
        ours, theirs = self.input()
        if self.mode == "sum" and not ours[0].is_nested and self.draw.random() < 0.4:
            weights = torch.randn(theirs[0].shape, dtype=torch.float32)
            ours, theirs = ((*each, *[None] * (2 - len(each)), weights) for each in (ours, theirs))
        found, expected = self.ours(*ours), self.theirs(*theirs)
        found = found.values() if found.is_nested else found
        assert found.dtype == self.dtype
        torch.testing.assert_close(found.float(), expected, rtol=self.tolerance, atol=self.tolerance)
        factor = torch.randn(expected.shape, dtype=torch.float32).to(self.dtype)
        return (found.double() * factor.double()).sum(), (expected.double() * factor.double()).sum()

    def step(self) -> None:
        self.optimizer.zero_grad()
        for _ in range(self.draw.choice((1, 2)) if self.update == "step" else 1):
            pairs = [self.losses() for _ in range(self.draw.choice((1, 1, 2, 3)))]
            for losses in zip(*pairs, strict=True):
                torch.stack(losses).sum().backward()
        self.optimizer.step()
        if self.update == "step":
            self.ours.fused_optimizer.step()
            self.ours.fused_optimizer.zero_grad()
        rows = self.ours.get_rows(torch.arange(self.rows))
        torch.testing.assert_close(rows, self.theirs.weight.detach(), rtol=10 * self.tolerance, atol=10 * self.tolerance)
        self.theirs.weight.data.copy_(rows)

    def copied(self) -> Any:
        """A copy by one of the ways that a model is copied or saved."""
        how = self.draw.choice(("deepcopy", "state", "file"))
        made: Any = copy.deepcopy(self.ours)
        if how == "state":
            made.reset_parameters()
            made.load_state_dict(self.ours.state_dict())
        if how == "file":
            file = io.BytesIO()
            torch.save(self.ours.state_dict(), file)
            file.seek(0)
            made.load_state_dict(torch.load(file, weights_only=True))
        return made


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_random_tables_train_as_those_of_torch(first: int) -> None:
    default = torch.get_default_dtype()
    try:
        for seed in range(first, first + 20):
            case = Case(seed)
            for _ in range(case.draw.choice((1, 2, 3))):
                case.step()
            case.ours = case.copied()
            case.step()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        torch.set_default_dtype(default)
