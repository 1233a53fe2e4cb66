"""Names alone: megatron-core subclasses one."""


class DelayedScaling: ...
