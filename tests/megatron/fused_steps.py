"""What megatron-core does where TransformerEngine is installed.

Steps with its layers, and the same with FSDP2's or megatron-core's own; what is said to recipes; a
start without the stand-ins for CUDA.

``python -m tests.megatron.fused_steps [FOLDER CASE TARGET]...``: a program of its own, as
megatron-core looks for TransformerEngine once, while it is imported. Each case gets a fork of it.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.config.actor import ActorConfig
from hybridrl.errors import ResourceError
from hybridrl.run.modes.check import rehearse_megatron
from hybridrl.workers.checkpointed import end_process_group, start_process_group
from hybridrl.workers.train.checkpoint import shards_of
from hybridrl.workers.train.megatron import megatron_core, rehearsal
from hybridrl.workers.train.megatron.context import MegatronContext
from hybridrl.workers.train.megatron.parallel import start_parallel
from hybridrl.workers.train.protocol import TrainState, WeightSet
from tests.config.test_megatron_recipes import MODELS, config_of
from tests.config.values import config_of as default_config_of
from tests.megatron.engines import build_megatron
from tests.megatron.stand_ins import install
from tests.workers.train.engines import (
    ACTOR,
    CPU,
    MODEL,
    build_fsdp2,
    make_rows,
    to_rollouts,
    update,
    weights_of,
)
from tests.workers.train.lora_engines import LORA

HALF = replace(ACTOR, compute_dtype="bfloat16", optimizer=replace(ACTOR.optimizer, lr=0.02))


def build(folder: Path, layers: str, config: ActorConfig = ACTOR, **megatron: Any) -> Any:
    return build_megatron(folder, config, layers=layers, **megatron)


def lose_and_restore(engine: Any) -> None:
    def live_values() -> dict[str, torch.Tensor]:
        named = engine.checkpoint_tensors().items()
        return {key: shard.values for name, held in named for key, shard in shards_of(name, held)}

    saved = {key: values.clone() for key, values in live_values().items()}
    with torch.no_grad():
        for _, parameter in engine.backend.stages.named_tensors():
            if parameter.requires_grad:
                parameter.zero_()
        engine.backend.optimizer.begin_restore(num_steps=engine.num_updates)
        for key, values in live_values().items():
            values.copy_(saved[key])
    engine.backend.end_restore()


def two_steps(engine: Any, *, num_siblings: int, restores: bool = False) -> dict[str, Any]:
    rows = make_rows(8, num_siblings=num_siblings)
    steps = []
    for _ in range(2):
        scores = engine.compute_logprobs(to_rollouts(rows), temperature=0.9)
        norm = update(engine, rows)["policy/grad_norm"]
        steps.append((scores.logprobs_BL.values(), norm))
        for part in TrainState:  # asleep, and awake again
            engine.offload(part)
        for part in TrainState:
            engine.restore(part)
        if restores:
            lose_and_restore(engine)
    found = {"steps": steps, "weights": weights_of(engine)}
    if WeightSet.ADAPTER in engine.weight_sets:
        found["adapter"] = {n: t.clone() for n, t in engine.full_weights(WeightSet.ADAPTER)}
    return found


def layers(folder: Path, other: str) -> tuple[Any, Any]:
    return build(folder, "transformer_engine"), (
        build_fsdp2(folder) if other == "fsdp2" else build(folder, other)
    )


def attention(folder: Path) -> tuple[Any, Any]:
    fused = build(folder, "transformer_engine", attention="transformer_engine")
    return fused, build_fsdp2(folder)


def adapter(folder: Path) -> tuple[Any, Any]:
    return build(folder, "transformer_engine", lora=LORA), build(folder, "local", lora=LORA)


def small_state(folder: Path) -> tuple[Any, Any]:
    """Masters within the optimizer, and moments of 16 bits."""
    given = {"use_precision_aware_optimizer": True}
    fused = build(folder, "transformer_engine", HALF, optimizer_args=given)
    return fused, build(folder, "transformer_engine", HALF)


def half_offloaded(folder: Path) -> tuple[Any, Any]:
    """Half of masters and moments on the host, all of which slime has there for Qwen3-30B-A3B."""
    given = {
        "use_precision_aware_optimizer": True,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
        "pin_cpu_grads": False,
    }
    fused = build(folder, "transformer_engine", HALF, optimizer_args=given)
    return fused, build(folder, "transformer_engine", HALF)


CASES: dict[str, Callable[[Path], tuple[Any, Any]]] = {
    "fsdp2": lambda folder: layers(folder, "fsdp2"),
    "local": lambda folder: layers(folder, "local"),
    "attention": attention,
    "adapter": adapter,
    "small state": small_state,
    "half offloaded": half_offloaded,
}


def start(_folder: Path) -> dict[str, Any]:
    """Start megatron-core without stand-ins for CUDA."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    megatron = default_config_of("actor=megatron").megatron
    context = MegatronContext(megatron=megatron, model=MODEL, device=CPU, seed=0, timeout_s=60.0)
    try:
        start_parallel(context)
    except ResourceError as error:
        return {"error": str(error), "warnings": megatron_core.IMPORT_WARNINGS}
    return {"error": ""}


_FIELDS = (
    *("transformer_impl", "moe_grouped_gemm", "moe_permute_fusion", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "bias_activation_fusion"),
)


def recipes(folder: Path) -> dict[str, Any]:
    """Return what is said to each recipe, and what megatron-core built for it."""
    built: list[Any] = []
    module: Any = rehearsal
    plan = module.transformer_config

    def plan_and_keep(*args: Any, **kwargs: Any) -> Any:
        built.append(plan(*args, **kwargs))
        return built[-1]

    module.transformer_config = plan_and_keep
    found = {}
    for name in MODELS:
        built.clear()
        (folder / name).mkdir()
        lines = rehearse_megatron(config_of(name, folder / name))
        fields = [{field: getattr(config, field) for field in _FIELDS} for config in built]
        for of_config, config in zip(fields, built, strict=True):
            of_config["attention"] = config.attention_backend.name
        found[name] = (lines, fields)
    return found


ALONE = {"start": start, "recipes": recipes}
"""Cases that take no steps."""


def main(folder: Path, case: str, target: Path) -> None:
    if case in ALONE:
        torch.save(ALONE[case](folder), target)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    start_process_group(device="cpu", local_rank=0, timeout_s=60.0)
    fused, plain = CASES[case](folder)
    num_siblings = 1 if case == "attention" else 2  # a shared prompt takes torch's own kernel
    found: dict[str, Any] = {
        "fused": two_steps(fused, num_siblings=num_siblings, restores=True),
        "plain": two_steps(plain, num_siblings=num_siblings),
    }
    found["names"] = [name for name, _ in fused.backend.stages.named_tensors()]
    found["fields"] = vars(fused.backend.stages.transformer)
    kept = {"gradient_accumulation_fusion", "apply_rope_fusion", "moe_permute_fusion"}
    found["fields"] = {name: found["fields"][name] for name in kept}
    from transformer_engine.pytorch import DotProductAttention

    found["attended"] = DotProductAttention.num_calls
    torch.save(found, target)
    end_process_group()


def main_of_all(words: Sequence[str]) -> None:
    """Do each case in a process of its own; what one of them raises is printed."""
    importlib.import_module("hybridrl.workers.train.megatron.lora")  # once for all forks
    for at in range(0, len(words), 3):
        folder, case, target = words[at : at + 3]
        if case != "start":
            install()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            continue
        try:
            main(Path(folder), case, Path(target))
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main_of_all(sys.argv[1:])
