"""Training on megatron-core; the only package that imports it, and loaded only when asked for."""
