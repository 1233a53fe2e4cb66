"""Training and rollout engines share a device in turns: who sleeps, who wakes, and the weights."""
