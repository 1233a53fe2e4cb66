"""How much memory a run will take, computed from its configuration alone: neither torch nor Ray."""
