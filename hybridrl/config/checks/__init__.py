"""Rules across keys of the configuration, one subject a file."""
