"""From an outline of a graph to a schedule. Imports neither torch nor torch.distributed."""
