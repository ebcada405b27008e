"""`train.py` under Ray Train: python ray_train.py --workers 8 --gpu --folder /shared/run

Ray starts a worker for each GPU, sets the variables of torchrun, and makes the process group. If a worker or a node dies, it
starts all workers again, which resume from the last save: `--workers 64:128` goes on with the workers that are left.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(settings: dict[str, Any]) -> None:
    """One rank."""
    import train

    train.main(**settings)


def main(settings: dict[str, Any], workers: tuple[int, int], gpu: bool) -> None:
    """Train to the end, through any number of failures up to 100."""
    if not ray.is_initialized():
        ray.init(runtime_env={"py_modules": [str(Path(__file__).with_name("train.py"))]})
    trainer = TorchTrainer(
        work,
        train_loop_config=settings,
        scaling_config=ScalingConfig(num_workers=workers if workers[0] < workers[1] else workers[0], use_gpu=gpu),
        torch_config=TorchConfig(backend="nccl" if gpu else "gloo", timeout_s=300),
        run_config=RunConfig(
            name="thermocline", storage_path=settings["folder"], failure_config=FailureConfig(max_failures=100)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="train.py under Ray Train")
    parser.add_argument("--workers", default="8", help="number of workers, or LEAST:MOST")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument(
        "--folder", type=lambda text: str(Path(text).absolute()), default="run", help="folder that all nodes share"
    )
    parser.add_argument("--topology", default="hgx-h200")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    given = vars(parser.parse_args())
    least, _, most = given.pop("workers").partition(":")
    main(given, (int(least), int(most or least)), given.pop("gpu"))
