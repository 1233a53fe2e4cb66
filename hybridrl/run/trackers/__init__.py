"""Targets of metrics besides the run folder: one module each, imported on request."""
