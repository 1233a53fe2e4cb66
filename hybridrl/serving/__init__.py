"""Rollout servers: engines on devices of their own, in groups; docs/serving.md."""
