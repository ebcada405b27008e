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


# -- one line added: loops that own their optimizer, with update="step" ---------------------------------------------------


def unconverted():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(203, 16, mode="sum"), torch.nn.Linear(16, 1))
    model.loss = lambda ids, label: torch.nn.functional.binary_cross_entropy_with_logits(model(ids).squeeze(1), label)
    return model


def converted():
    model = unconverted()
    tc.convert_(model, tc.RowConfig("fp32", update="step", optimizer=tc.SGD(lr=0.5)))
    return model


def assert_trained_alike(run):
    """What a loop makes of the converted model is what it makes of the unconverted one."""
    found = [run(make_model) for make_model in (unconverted, converted)]
    torch.testing.assert_close(found[1][0].weight.detach(), found[0][0].weight.detach(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found[1][1].weight, found[0][1].weight, rtol=1e-4, atol=1e-6)
    assert not torch.equal(found[0][0].weight, unconverted()[0].weight)


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_clip_val": 0.05}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}],
    ids=["plain", "clipping", "accumulation", "bf16"],
)
def test_lightning_trains_a_converted_model_as_the_unconverted_one(settings, tmp_path):
    lightning = pytest.importorskip("lightning", reason="no Lightning here; CONTRIBUTING.md says how to get it")

    class Lit(lightning.LightningModule):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def training_step(self, batch, number):
            return self.model.loss(*batch)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def run(make_model):
        quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
        model = make_model()
        loop = lightning.Trainer(max_epochs=3, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet, **settings)
        loop.fit(Lit(model), batches())
        return model

    assert_trained_alike(run)


def test_accelerate_trains_a_converted_model_as_the_unconverted_one_and_resumes(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="no accelerate here; CONTRIBUTING.md says how to get it")

    def run(make_model, resumed=False):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False)
        given = accelerator.prepare(model, optimizer, batches(), schedule)
        for epoch in range(2):
            if resumed and epoch == 0:
                accelerator.load_state(str(tmp_path))
                continue
            for ids, label in given[2]:
                with accelerator.accumulate(given[0]):
                    accelerator.backward(given[0].loss(ids, label))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.05)
                    given[1].step()
                    given[1].zero_grad()
            given[3].step()
            if epoch == 0:
                accelerator.save_state(str(tmp_path))
        return model

    assert_trained_alike(run)
    whole = run(converted)
    torch.testing.assert_close(run(converted, resumed=True)[0].weight, whole[0].weight, rtol=0, atol=0)
