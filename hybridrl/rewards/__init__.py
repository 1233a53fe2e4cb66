"""Reward functions and who calls them; those with a name are in ``config/reward.py``."""
