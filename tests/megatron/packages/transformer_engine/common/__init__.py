"""Recipes of 8-bit types."""

from transformer_engine.common import recipe

__all__ = ["recipe"]
