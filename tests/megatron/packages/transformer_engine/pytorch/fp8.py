"""Names alone: without 8-bit types nothing of it is called."""


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def fp8_autocast(*_: object, **__: object) -> None:
    raise NotImplementedError


def fp8_model_init(*_: object, **__: object) -> None:
    raise NotImplementedError
