"""Parts of ``benchmarks/gpu.py``: one idea a file. ``registry.py`` lists them."""
