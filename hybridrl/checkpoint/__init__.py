"""Checkpoints on the disk: manifest, store, and the check before a run resumes."""
