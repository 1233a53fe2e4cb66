"""Where metrics go besides the run folder: one module each, imported when asked for."""
