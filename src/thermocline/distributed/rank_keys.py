"""`RankKeys`: the buckets of an elastic table that one rank has. All ranks grow alike, by the ids of all."""

from __future__ import annotations

from torch import Tensor

from thermocline.ids.elastic import KeyTable
from thermocline.ids.elastic_rows import ElasticRows
from thermocline.kernels.elastic.fields import BUCKET, STEPS
from thermocline.kernels.elastic.reference import bucket_of
from thermocline.kernels.ids.reference import hash_ids


class RankKeys(KeyTable):
    """The buckets of one rank. Its sketch halves by the lookups of all ranks."""

    def __init__(self, policy: ElasticRows, key: int, rank: int, ranks: int) -> None:
        count = -(-policy.own // BUCKET)
        super().__init__(policy, key, "cpu", range(count * rank // ranks, count * (rank + 1) // ranks))
        self.uncounted = 0  # lookups of this rank without a row, of the last step
        self.used_by_all = 0  # ids with a row, of all ranks

    def _age_sketch(self, lookups: int) -> None:
        self.uncounted += lookups

    def age(self, lookups: int) -> None:
        """Count the lookups of all ranks without a row."""
        self.uncounted = 0
        super()._age_sketch(lookups)

    @property
    def used(self) -> int:
        return self.used_by_all

    def grow(self) -> None:
        """Nothing yet: what other ranks did in this step is not known here."""

    def grow_with_all(self) -> None:
        """Open more rows, after a step of all ranks."""
        super().grow()

    def owners(self, ids_N: Tensor, ranks: int) -> Tensor:
        """The rank that has each id's bucket."""
        count = -(-self.rules.rows // BUCKET)
        return ((bucket_of(hash_ids(ids_N, self.rules.key), self.rules.rows) + 1) * ranks - 1) // count

    def take(self, whole: KeyTable) -> None:
        """Take the buckets of this rank from a table that has all; the first rank takes its counts."""
        mine = self.buckets.start == 0 and len(self.buckets) > 0
        self.used_by_all = whole.occupied().numel()
        for name, tensor in self.tensors().items():
            if name in ("clock", "open"):
                tensor.copy_(whole.tensors()[name])
            elif name == "counts":
                tensor.copy_(whole.counts)
                tensor[: 0 if mine else STEPS] = 0
            else:
                begin = _words(name) * self.buckets.start
                tensor.copy_(whole.tensors()[name][begin : begin + tensor.numel()])


def _words(name: str) -> int:
    """Elements of an array for each bucket."""
    return {"keys": BUCKET, "last": BUCKET, "tags": BUCKET // 4, "heat": BUCKET // 4}.get(name, 2 * BUCKET // 4)
