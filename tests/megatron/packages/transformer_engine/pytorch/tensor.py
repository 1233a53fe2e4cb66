"""Names alone."""


class QuantizedTensor: ...
