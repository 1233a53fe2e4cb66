"""What runs a run: processes, its folder, resuming, the terminal."""
