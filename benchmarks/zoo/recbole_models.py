"""BPR, NeuMF, LightGCN, SASRec and GRU4Rec of RecBole on a third of MovieLens-100k.

Its `Trainer` validates after each epoch, and tests the best checkpoint. RecBole 1.2 expects older versions of numpy, scipy and
torch: what they had is given to it here.
"""

from __future__ import annotations

import atexit
import logging
import shutil
import sys
import tempfile
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import scipy.sparse
import torch

import thermocline as tc

from .case import Convert, Trained, ZooCase

for old, new in (("bool8", np.bool_), ("float_", np.float64), ("complex_", np.complex128), ("unicode_", np.str_)):
    vars(np).setdefault(old, new)  # RecBole expects numpy 1

import recbole  # noqa: E402
from recbole.config import Config  # noqa: E402
from recbole.data import create_dataset, data_preparation  # noqa: E402
from recbole.utils import get_model, get_trainer, init_seed  # noqa: E402

LR, DATASET = 0.05, "ml-33k"
SETTINGS = {
    "learner": "adagrad", "learning_rate": LR, "epochs": 2, "train_batch_size": 1024, "embedding_size": 32, "hidden_size": 32,
    "topk": 10, "valid_metric": "Recall@10", "metric_decimal_place": 8, "show_progress": False, "use_gpu": False,
    "state": "ERROR", "load_col": {"inter": ["user_id", "item_id", "timestamp"]},
}  # fmt: skip
SEQUENCES = {
    "user_inter_num_interval": "[0,100]", "item_inter_num_interval": "[5,inf)", "train_batch_size": 256, "epochs": 3,
    "MAX_ITEM_LIST_LENGTH": 10, "n_layers": 1, "inner_size": 64, "num_layers": 1, "train_neg_sample_args": None,
    "eval_args": {"split": {"LS": "valid_and_test"}, "order": "TO", "mode": "full", "group_by": "user"},
}  # fmt: skip
NEUMF = {"mf_embedding_size": 32, "mlp_embedding_size": 32, "mlp_hidden_size": [32, 16]}


@cache
def dataset_folder() -> Path:
    """A third of the users of RecBole's MovieLens-100k."""
    found = Path(recbole.__file__).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    head, *lines = found.read_text(encoding="utf-8").splitlines()
    folder = Path(tempfile.mkdtemp(prefix="zoo"))
    atexit.register(shutil.rmtree, folder)
    kept = (line for line in lines if int(line.split()[0]) % 3 == 0)
    (folder / DATASET).mkdir()
    (folder / DATASET / f"{DATASET}.inter").write_text("\n".join([head, *kept]) + "\n", encoding="utf-8")
    return folder


def train(name: str, settings: dict[str, Any], seed: int, convert: Convert) -> Trained:
    load = partial(torch.load, weights_only=False)  # RecBole saves its configuration as an object
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(torch, "load", load),
        patch.object(sys, "argv", sys.argv[:1]),  # RecBole reads settings from it
        patch("recbole.trainer.trainer.get_tensorboard"),  # it writes to the working folder
        patch.object(scipy.sparse.dok_matrix, "_update", lambda self, entries: self._dict.update(entries), create=True),
    ):
        folders = {"checkpoint_dir": folder, "data_path": str(dataset_folder())}
        config = Config(name, DATASET, config_dict={**SETTINGS, **settings, **folders, "seed": seed})
        logging.disable()
        init_seed(seed, True)
        train_data, valid_data, test_data = data_preparation(config, create_dataset(config))
        init_seed(seed, True)
        model = get_model(name)(config, train_data._dataset)
        convert(model)
        trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
        trainer.fit(train_data, valid_data)
        metric = trainer.evaluate(test_data)["recall@10"]
        logging.disable(logging.NOTSET)
    return Trained(metric, list(trainer.train_loss_dict.values()))


CASES = [
    ZooCase(name, "recbole", "recall@10", tc.Adagrad(lr=LR), partial(train, name, settings))
    for name, settings in {"BPR": {}, "NeuMF": NEUMF, "LightGCN": {}, "SASRec": SEQUENCES, "GRU4Rec": SEQUENCES}.items()
]
