"""Tables and batches that tests of serving share."""

from __future__ import annotations

import math
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from thermocline import formats as F
from thermocline.ids.idmap import IdMap
from thermocline.kernels.quantize.reference import quantize_rows
from thermocline.kernels.serve.fields import ServedBags
from thermocline.serve.tables.partition import RowHeat, balanced_split, split_tables
from thermocline.serve.tables.row_split import TableSplit
from thermocline.serve.tables.segments import BlockWriter, ServedTable, SharedSegment, make_layout, put_rows
from thermocline.serve.tables.version import TableVersion

Table = tuple[int, int, str]  # rows, dimension, precision
BLOCK = 37  # rows put in place at a time: odd, so that runs are cut


class Tables:
    """Tables in memory: codes and meta words of each, as a checkpoint has them."""

    def __init__(self, tables: Sequence[Table], seed: int = 0, features: Mapping[int, Sequence[str]] | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.infos, self.codes, self.meta = [], [], []
        for n, (rows, dim, precision) in enumerate(tables):
            format = F.NAMES.index(precision)
            codes_RB, meta_RW = quantize_rows(torch.randn(rows, dim, generator=generator), format, None, None)
            self.infos.append(ServedTable(f"t{n}", rows, dim, format, tuple((features or {}).get(n, (f"t{n}",)))))
            self.codes.append(codes_RB.numpy())
            self.meta.append(meta_RW.numpy())

    def splits(self, shards: int, split: str, seed: int = 0) -> list[TableSplit]:
        """Splits by name; "plan" with random heat and a tenth of the rows copied."""
        if split != "plan":
            return split_tables(self.infos, shards, split)
        random, load_S = np.random.default_rng(seed), np.zeros(shards)
        made = []
        for shape in self.infos:
            rows_H = random.permutation(shape.rows)[: random.integers(0, shape.rows + 1)]
            heat = RowHeat(rows_H, np.sort(random.integers(1, 99, len(rows_H)))[::-1])
            made.append(balanced_split(shape, shards, heat, (shape.rows + 9) // 10, load_S))
        return made

    def version(
        self,
        shards: int = 3,
        split: str = "hash",
        id_maps: Mapping[str, IdMap] | None = None,
        records: bool = True,
        seed: int = 0,
    ) -> TableVersion:
        """The tables over shards in this process."""
        layout = make_layout(self.infos, self.splits(shards, split, seed), records)
        segments = [SharedSegment(size) for size in layout.sizes_S]
        memory = [segment.memory for segment in segments]
        for layout_of_table, codes_RB, meta_RW in zip(layout.tables, self.codes, self.meta, strict=True):
            writer = BlockWriter(layout_of_table, segments)
            for first in range(0, len(codes_RB), BLOCK):
                rows_R, part = np.arange(len(codes_RB))[first : first + BLOCK], slice(first, first + BLOCK)
                if records:
                    writer.put(first, codes_RB[part], meta_RW[part])
                else:
                    put_rows(layout_of_table, memory, rows_R, codes_RB[part], meta_RW[part])
        modes = {feature: F.SUM for info in self.infos for feature in info.features}
        return TableVersion.of("1", layout, [torch.from_numpy(each) for each in memory], id_maps or {}, modes)


@pytest.fixture(scope="session")
def make_tables() -> Callable[..., Tables]:
    return Tables


def random_bags(
    version: TableVersion,
    longest: int,
    most: int,
    seed: int,
    pooled: bool = True,
    weighted: bool = False,
    mode: int = F.SUM,
    even: bool = False,
) -> tuple[ServedBags, Tensor]:
    """Lookups of rows, as many bags of each feature as chance wants, and room for their answers (poisoned)."""
    random = np.random.default_rng(seed)
    tables = [version.layout.tables[n].table for n in version.tables]
    counts_F = np.full(len(tables), most) if even else random.integers(0, most + 1, len(tables))
    ends_F1 = np.concatenate([[0], np.cumsum(counts_F)])
    lengths_B = random.integers(0, longest + 1, ends_F1[-1]) if pooled else np.ones(ends_F1[-1], np.int64)
    offsets_B1 = np.concatenate([[0], np.cumsum(lengths_B)])
    rows = [
        random.integers(0, table.rows, offsets_B1[ends_F1[f + 1]] - offsets_B1[ends_F1[f]]) for f, table in enumerate(tables)
    ]
    sizes = counts_F * np.array([table.dim for table in tables])
    target_F2 = np.stack([np.cumsum(sizes) - sizes, [table.dim for table in tables]], 1)
    weights = torch.from_numpy(random.standard_normal(offsets_B1[-1]).astype(np.float32)) if weighted else None
    tensors: Any = [
        torch.from_numpy(np.asarray(each, np.int64)) for each in (np.concatenate(rows), ends_F1, offsets_B1, target_F2)
    ]
    each = most if (counts_F == most).all() else 0
    align = math.gcd(16, *target_F2.ravel().tolist())
    bags = ServedBags(
        tensors[0], tensors[1], tensors[2] if pooled else None, weights, mode, tensors[3], int(ends_F1[-1]), each, align
    )
    return bags, torch.full((int(sizes.sum()),), float("nan"))


@pytest.fixture(scope="session")
def make_bags() -> Callable[..., tuple[ServedBags, Tensor]]:
    return random_bags


@pytest.fixture(scope="session")
def make_certificates() -> Callable[[Path], tuple[Path, Path, Path]]:
    """Makes a CA, and a certificate and key of it for the loopback: (certificate, key, CA)."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")

    def make(folder: Path) -> tuple[Path, Path, Path]:
        folder.mkdir()
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        certificate, key, ca, ca_key = (folder / f"{name}.pem" for name in ("cert", "key", "ca", "ca_key"))
        run = partial(subprocess.run, check=True, capture_output=True)
        run([*new, "-subj", f"/CN=CA {folder.name}", "-keyout", ca_key, "-out", ca])
        own = ["-subj", "/CN=localhost", "-addext", names, "-addext", "basicConstraints=critical,CA:FALSE"]
        run([*new, *own, "-CA", ca, "-CAkey", ca_key, "-keyout", key, "-out", certificate])
        return certificate, key, ca

    return make
