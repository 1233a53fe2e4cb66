"""A rank's cycle on a GPU that is not there: the product's own objects on fake tensors."""
