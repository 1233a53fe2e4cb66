"""Everything around the training loop: processes, run folder, resuming, the terminal."""
