"""What needs more than one GPU, so that no part shows it."""

SEVERAL = (
    "tensor-parallel engines: one leader talks HTTP, every rank contributes to the weight stream",
    "sharded training over NCCL: weights gathered bucket by bucket while the engine receives",
    "release and resume on several ranks, each stage finished on all before the next",
    "megatron-core over NCCL: tensor, pipeline, context and expert parallelism",
)
"""For the page; the tests are in tests/gpu/test_several.py and tests/gpu/test_megatron.py."""
