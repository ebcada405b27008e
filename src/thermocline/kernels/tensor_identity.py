"""Recognise a tensor by object, memory and autograd version; writes that autograd does not see go unnoticed."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorIdentity(NamedTuple):
    """A tensor as it was. Holds the memory: `.data = ...` gives the same object another, and addresses are used again."""

    tensor: Tensor
    memory: torch.UntypedStorage
    address: int
    version: int | None  # inference tensors have none, and are never unchanged

    @classmethod
    def of(cls, tensor: Tensor) -> TensorIdentity:
        version = None if tensor.is_inference() else tensor._version
        return cls(tensor, tensor.untyped_storage(), tensor.data_ptr(), version)

    def matches(self, tensor: Tensor) -> bool:
        """Whether `tensor` is the same object with the same contents."""
        return tensor is self.tensor and self.is_unchanged(tensor)

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Whether `tensor`, which may be another view of the same memory, has the contents that this one had."""
        return self.version is not None and tensor._version == self.version and tensor.data_ptr() == self.address
