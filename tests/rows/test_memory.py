"""Memory that a card reaches: it is not given back before the card is done with it."""

from __future__ import annotations

import torch

from thermocline.rows.memory import kept_for


def test_pinned_memory_waits_for_its_card_when_the_last_tensor_goes(monkeypatch):
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    given = torch.arange(63, dtype=torch.uint8)
    codes = kept_for(torch.device("cuda", 3), given)
    assert codes.data_ptr() == given.data_ptr() and torch.equal(codes, given)
    codes[5] = 7
    assert given[5] == 7
    part = codes[10:20].view(2, 5)
    del codes
    assert waits == []  # somebody has it still
    del part
    assert waits == [torch.device("cuda", 3)]
