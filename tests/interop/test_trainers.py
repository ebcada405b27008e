"""Other people's training loops: what Lightning and accelerate train equals what a plain loop trains, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import thermocline as tc

STEPS, BATCH = 5, 17


class Model(torch.nn.Module):
    def __init__(self, update="backward"):
        super().__init__()
        torch.manual_seed(3)
        self.rows = torch.nn.EmbeddingBag(203, 16, mode="sum")
        self.top = torch.nn.Linear(16, 1)
        tc.convert_(self, tc.RowConfig("int8", cache=0.1, optimizer=tc.Adagrad(lr=0.1), update=update))

    def loss(self, ids, label):
        return torch.nn.functional.binary_cross_entropy_with_logits(self.top(self.rows(ids)).squeeze(1), label)


def batches():
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(203, (STEPS * BATCH, 4), generator=draw)
    return DataLoader(TensorDataset(ids, (ids.sum(1) % 2).float()), batch_size=BATCH)


def plain_loop(model):
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    for ids, label in batches():
        optimizer.zero_grad()
        model.loss(ids, label).backward()
        optimizer.step()
    return model


def assert_same(found, expected):
    assert torch.equal(found.rows.weight, expected.rows.weight)
    assert torch.equal(found.top.weight, expected.top.weight)
    assert not torch.equal(found.rows.weight, Model().rows.weight)


def test_lightning_trains_and_resumes(tmp_path):
    lightning = pytest.importorskip("lightning", reason="no Lightning here; CONTRIBUTING.md says how to get it")

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, number):
            return self.model.loss(*batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.model.top.parameters(), lr=0.1)  # rows bring their own

    def trainer(epochs):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
        return lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)

    trained = Lit()
    first = trainer(1)
    first.fit(trained, batches())
    assert_same(trained.model, plain_loop(Model()))
    first.save_checkpoint(tmp_path / "one.ckpt")
    resumed = Lit()
    trainer(2).fit(resumed, batches(), ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    assert_same(resumed.model, plain_loop(plain_loop(Model())))


def test_accelerate_trains():
    accelerate = pytest.importorskip("accelerate", reason="no accelerate here; CONTRIBUTING.md says how to get it")
    model = Model()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.top.parameters(), lr=0.1), batches())
    for ids, label in loader:
        optimizer.zero_grad()
        accelerator.backward(prepared.loss(ids, label))
        optimizer.step()
    assert_same(accelerator.unwrap_model(prepared), plain_loop(Model()))


def test_accelerate_accumulates_gradients_of_rows_that_wait_for_their_step():
    accelerate = pytest.importorskip("accelerate", reason="no accelerate here; CONTRIBUTING.md says how to get it")
    model, expected = Model(update="step"), Model(update="step")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=STEPS)
    given = (torch.optim.SGD(model.top.parameters(), lr=0.1), tc.fused_optimizer(model))
    prepared, dense, rows, loader = accelerator.prepare(model, *given, batches())
    for ids, label in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared.loss(ids, label))
            for optimizer in (dense, rows):
                optimizer.step()
                optimizer.zero_grad()
    for ids, label in batches():
        (expected.loss(ids, label) / STEPS).backward()
    torch.optim.SGD(expected.top.parameters(), lr=0.1).step()
    expected.rows.fused_optimizer.step()
    assert_same(accelerator.unwrap_model(prepared), expected)
