"""The rollout engine that is an SGLang server."""
