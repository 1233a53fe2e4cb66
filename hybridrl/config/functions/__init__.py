"""Functions of algorithms and rewards, read from their source; built-in names: ``parts.yaml``."""
