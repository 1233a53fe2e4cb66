"""The rollout engine that runs inside a rank."""
