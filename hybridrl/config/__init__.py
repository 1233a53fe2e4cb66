"""The configuration as frozen dataclasses, one file per section. Imports no torch, no Hydra."""
