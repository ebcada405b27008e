"""Tables past 2^31 elements: addresses are 64-bit everywhere. int2 keeps this at 0.7 GB."""

from __future__ import annotations

import torch

from thermocline import SGD, Arena, TableSpec, Trainer, lookup

ROWS, DIM = 2**25 + 3, 65


def test_rows_past_two_billion_elements_are_read_and_trained():
    arena = Arena([TableSpec(ROWS, DIM, "int2", "large")])
    assert ROWS * DIM > 2**31
    rows_N = torch.tensor([0, 2**31 // DIM, 2**31 // DIM + 1, ROWS - 1])
    values_ND = torch.arange(4.0)[:, None] + torch.tensor([0.0, 3.0] * 32 + [0.0])
    arena.write(0, rows_N, values_ND)
    trainer = Trainer(arena, SGD(lr=1.0), stochastic=False)
    out = lookup(arena, rows_N, torch.tensor([0, 4]), mode="none", trainer=trainer)
    torch.testing.assert_close(out, values_ND)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(arena.read(0, rows_N), values_ND - 1)
    assert arena.read(0, rows_N[1:3] - 2).abs().max() == 0
