"""Several cards and nodes at work together, on torch.distributed."""
