"""Checkpoints on the disk: what they say, which is the newest whole one, what may be resumed."""
