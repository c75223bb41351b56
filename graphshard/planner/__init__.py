"""From a priced problem to a schedule. Imports neither torch nor torch.distributed."""
