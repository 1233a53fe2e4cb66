"""Training on megatron-core: the only package that imports it, and not before it is asked for."""
