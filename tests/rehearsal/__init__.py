"""The product's cycle of a rank, executed on GPUs that are not there."""
