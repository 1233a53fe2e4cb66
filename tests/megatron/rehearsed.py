"""What megatron-core says to recipes where TransformerEngine is installed, and what it built.

``python -m tests.megatron.rehearsed FOLDER RECIPE...``: a program of its own, as megatron-core
looks for TransformerEngine once, while it is imported. No stand-in for CUDA is installed:
configuration objects ask for no device.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hybridrl.run.modes.check import rehearse_megatron
from hybridrl.workers.train.megatron import rehearsal
from tests.config.test_megatron_recipes import config_of

_FIELDS = (
    *("transformer_impl", "moe_grouped_gemm", "moe_token_dispatcher_type", "bf16"),
    *("gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion"),
    *("bias_activation_fusion", "sequence_parallel", "num_layers"),
)


def main(folder: Path, names: list[str]) -> None:
    built: list[Any] = []
    module: Any = rehearsal
    plan = module.transformer_config

    def plan_and_keep(*args: Any, **kwargs: Any) -> Any:
        built.append(plan(*args, **kwargs))
        return built[-1]

    module.transformer_config = plan_and_keep
    for name in names:
        built.clear()
        (folder / name).mkdir()
        lines = rehearse_megatron(config_of(name, folder / name))
        fields = [{field: getattr(config, field) for field in _FIELDS} for config in built]
        for found, config in zip(fields, built, strict=True):
            found["attention"] = config.attention_backend.name
        sys.stdout.write(json.dumps({"lines": lines, "fields": fields}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
