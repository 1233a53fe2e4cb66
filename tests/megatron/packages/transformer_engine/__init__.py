"""A stand-in for TransformerEngine 2.6: its modules' names and parameters, on a CPU, in torch.

Written from what megatron-core 0.16.1 passes and reads, and from the sources of TransformerEngine
2.11 where those say what is returned. It proves that layers, attention and optimizers are put
together, named, loaded and exported as they are meant to be, and nothing about the kernels. It goes
on a process' path before megatron is imported; one rank, no tensor parallelism, no 8-bit types.
"""

from transformer_engine import common, pytorch

__version__ = "2.6.0"
__all__ = ["common", "pytorch"]
