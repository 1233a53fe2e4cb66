"""Foreign code runs in processes of its own, which can be ended with all that they started."""
