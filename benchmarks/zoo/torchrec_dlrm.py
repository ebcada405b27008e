"""DLRM of TorchRec around its EmbeddingBagCollection."""

from __future__ import annotations

import torch
import torchrec
from torchrec.models.dlrm import DLRM

import thermocline as tc

from .case import LOG, TABLES, TEST, TRAIN, Convert, Trained, ZooCase, auc_of

DIM, BATCH, LR = 16, 128, 0.05
KEYS = [f"feature{t}" for t in range(len(TABLES))]


def jagged(ids_BF: torch.Tensor) -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(KEYS, ids_BF.T.reshape(-1), lengths=torch.ones(ids_BF.numel(), dtype=torch.int32))


def train(seed: int, convert: Convert) -> Trained:
    torch.manual_seed(seed)
    configs = [
        torchrec.EmbeddingBagConfig(name=f"table{t}", num_embeddings=rows, embedding_dim=DIM, feature_names=[key])
        for t, (rows, key) in enumerate(zip(TABLES, KEYS, strict=True))
    ]
    model = DLRM(torchrec.EmbeddingBagCollection(tables=configs), LOG.dense, [32, DIM], [32, 1])
    convert(model)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    losses = []
    for at in torch.randperm(len(TRAIN.label_B)).split(BATCH):
        logits = model(TRAIN.dense_BI[at], jagged(TRAIN.ids_BF[at])).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, TRAIN.label_B[at])
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return Trained(auc_of(model(TEST.dense_BI, jagged(TEST.ids_BF))), losses)


CASES = [ZooCase("DLRM of TorchRec", "torchrec", "AUC", tc.Adagrad(lr=LR), train)]
