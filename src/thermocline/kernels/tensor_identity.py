"""What tells a tensor from others, and from itself after a change: for batches that are known again by their tensors.

Only while its memory is held: the same address may be another tensor's later. Changes behind autograd's back are not seen.
"""

from __future__ import annotations

from torch import Tensor


def mark_of(tensor: Tensor) -> tuple[object, ...]:
    """Address, form and version of a tensor; equal marks are of a tensor that did not change in between."""
    version = object() if tensor.is_inference() else tensor._version  # where it has none: like no other
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version
