"""DeepFM and xDeepFM of deepctr-torch, trained by their `fit` with validation after each epoch."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import torch
from deepctr_torch import models
from deepctr_torch.inputs import DenseFeat, SparseFeat

import thermocline as tc

from .case import LOG, TABLES, TEST, TRAIN, Convert, Trained, ZooCase

SPARSE = [SparseFeat(f"table{t}", rows, embedding_dim=16) for t, rows in enumerate(TABLES)]
COLUMNS = [*SPARSE, *(DenseFeat(f"dense{i}", 1) for i in range(LOG.dense))]
SETTINGS = {"DeepFM": {}, "xDeepFM": {"cin_layer_size": (16, 16)}}
NO_DECAY = {"l2_reg_linear": 0, "l2_reg_embedding": 0}  # they decay all rows of all tables in each step


def inputs(clicks: Any) -> dict[str, Any]:
    ids = {f"table{t}": clicks.ids_BF[:, t].numpy() for t in range(len(TABLES))}
    return {**ids, **{f"dense{i}": clicks.dense_BI[:, i].numpy() for i in range(LOG.dense)}}


def train(name: str, seed: int, convert: Convert) -> Trained:
    model = getattr(models, name)(COLUMNS, COLUMNS, seed=seed, dnn_hidden_units=(32, 16), **NO_DECAY, **SETTINGS[name])
    convert(model)
    model.compile("adagrad", "binary_crossentropy", ["auc"])
    torch.manual_seed(seed)
    test = inputs(TEST), TEST.label_B.numpy()
    with contextlib.redirect_stdout(io.StringIO()):
        history = model.fit(inputs(TRAIN), TRAIN.label_B.numpy(), batch_size=256, epochs=2, verbose=2, validation_data=test)
    return Trained(history.history["val_auc"][-1], history.history["loss"])


CASES = [ZooCase(name, "deepctr-torch", "AUC", tc.Adagrad(lr=0.01), partial(train, name)) for name in SETTINGS]
