"""facebookresearch/dlrm with its own row-wise Adagrad, imported from the shared folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import torch

import thermocline as tc

from .case import LOG, TABLES, TEST, TRAIN, Convert, Trained, ZooCase, auc_of

ZOO = Path(os.environ.get("THERMOCLINE_ZOO", Path(__file__).resolve().parents[3] / "shared" / "zoo"))
sys.path.append(str(ZOO / "dlrm"))

import dlrm_s_pytorch  # type: ignore[import-not-found] # noqa: E402
from optim.rwsadagrad import RWSAdagrad  # type: ignore[import-not-found] # noqa: E402

LR, BATCH, DIM = 0.05, 128, 16


def train(seed: int, convert: Convert) -> Trained:
    np.random.seed(seed)
    torch.manual_seed(seed)
    pairs = (len(TABLES) + 1) * len(TABLES) // 2
    sizes = [np.array(TABLES), np.array([LOG.dense, 32, DIM]), np.array([pairs + DIM, 32, 1])]
    model = dlrm_s_pytorch.DLRM_Net(DIM, *sizes, arch_interaction_op="dot", sigmoid_top=1)
    convert(model)
    optimizer = RWSAdagrad(model.parameters(), lr=LR)
    losses = []
    offsets = torch.arange(BATCH).repeat(len(TABLES), 1)
    for at in torch.randperm(len(TRAIN.label_B)).split(BATCH):
        batch_offsets = offsets[:, : len(at)]
        out = model(TRAIN.dense_BI[at], batch_offsets, TRAIN.ids_BF[at].T)
        loss = model.loss_fn(out, TRAIN.label_B[at, None])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        offsets = torch.arange(len(TEST.label_B)).repeat(len(TABLES), 1)
        return Trained(auc_of(model(TEST.dense_BI, offsets, TEST.ids_BF.T)), losses)


CASES = [ZooCase("DLRM", "facebookresearch/dlrm", "AUC", tc.RowwiseAdagrad(lr=LR, eps=1e-10), train)]
