"""Names alone: operations that fuse themselves, which megatron-core uses where it is told to."""


class Sequential: ...


class FusibleOperation: ...
