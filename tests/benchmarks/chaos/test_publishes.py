"""The judge of the benchmark that publishes under faults, and the benchmarks of publishing that are asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import thermocline
from benchmarks.chaos.publishes import Expected, PublishChaos
from benchmarks.chaos.trainer import ROWS, UNIVERSE, Trainer, write_npz
from benchmarks.freshness import benchmark as freshness
from benchmarks.runner import show


@pytest.fixture
def judge(tmp_path: Path) -> PublishChaos:
    """A judge that knows save 3 and two publishes of run 2."""
    (tmp_path / "2").mkdir()
    for name, value in (("save-3", 1.0), ("2/17", 2.0), ("2/18", 3.0)):
        rows = {"a": np.full((ROWS, 1), value, np.float32), "b": np.full((UNIVERSE, 1), value, np.float32)}
        write_npz(tmp_path / f"{name}.npz", **rows, known=np.arange(UNIVERSE) < value, run=2)
    judge = object.__new__(PublishChaos)
    judge.expected = Expected(tmp_path)
    return judge


@pytest.mark.parametrize(
    "version, a, b, known, verdict",
    [
        ("3", 1.0, 1.0, 1, "answered"),
        ("3+17", 2.0, 2.0, 2, "answered"),
        ("3+18", 3.0, 2.0, 3, "mixed"),
        ("3+18", 3.0, 3.0, 2, "mixed"),
        ("3+18", 3.0, 9.0, 3, "wrong"),
        ("4+18", 3.0, 3.0, 3, "wrong"),
        ("3+19", 3.0, 3.0, 3, "wrong"),
    ],
)
def test_publish_chaos_knows_a_right_answer_from_a_mixed_or_wrong_one(judge, version, a, b, known, verdict):
    for each in ("3", "3+17", "3+18"):
        assert judge.expected.place(each) == (2, int(each.partition("+")[2] or 0))
    ids = {"a": np.array([5, 0]), "b": np.arange(4)}
    found = {"a": np.full((2, 1), a, np.float32), "b": np.full((4, 1), b, np.float32), "b.known": np.arange(4) < known}
    assert judge._judge(version, ids, found) == verdict
    assert judge.expected.place("9") == (0, 0)


def test_the_trainer_of_chaos_writes_what_a_save_answers(tmp_path):
    trainer = Trainer(tmp_path / "model", tmp_path / "state")
    trainer.step()
    trainer.expect_save()
    thermocline.save(trainer.model, tmp_path / "model", incremental=True)
    found = Expected(tmp_path / "state" / "expected").of("1")
    again = thermocline.load(tmp_path / "model")
    assert found is not None and found["run"] == 1
    np.testing.assert_array_equal(found["a"], again.get_rows("a").numpy())
    np.testing.assert_array_equal(found["b.known"], (again.elastic("b").rows_of(torch.arange(UNIVERSE)) >= 0).numpy())
    assert 0 < found["b.known"].sum() < UNIVERSE and Trainer(tmp_path / "model", tmp_path / "state").run == 2


def test_asked_cases_of_freshness_are_those_that_are_measured():
    words = (freshness.__doc__ or "").replace("LOG", "criteo") + (freshness.__doc__ or "").replace("LOG", "globo")
    asked = Path(__file__).resolve().parents[3] / "benchmarks" / "asked.json"
    assert set(show.load_asked(asked)["freshness"]) == {word for word in words.split() if word.startswith("freshness/")}
