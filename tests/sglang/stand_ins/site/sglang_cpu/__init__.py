"""SGLang on a machine without CUDA; with ``sgl_kernel`` beside it. Imports nothing by itself."""
