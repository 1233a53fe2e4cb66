"""Names alone."""
