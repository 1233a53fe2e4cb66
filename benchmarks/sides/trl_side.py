"""TRL's side of the race: GRPOTrainer, stopped between steps until it is told to go on.

Runs in TRL's own environment and imports nothing of hybridrl.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.sides.gate import Gate, open_gate


class TimedTrainer(GRPOTrainer):
    """Notes when sampling begins and ends, and when the batch of the update is ready."""

    generate_s = 0.0
    prepare_s = 0.0
    prompt_tokens = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.generate_s = time.perf_counter() - began
        self.prompt_tokens = sum(len(ids) for ids in prompt_ids) / len(prompt_ids)
        return result

    def _prepare_inputs(self, generation_batch: Any) -> Any:  # noqa: ANN401
        began = time.perf_counter()
        result = super()._prepare_inputs(generation_batch)
        self.prepare_s = time.perf_counter() - began
        return result


class PassesGate(TrainerCallback):
    """Reports each step, and waits for the parent's word after the last one allowed."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self.trainer: TimedTrainer | None = None
        self._prepared_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        self._prepared_s = self._gate.step_s  # the prompts had been fetched

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ANN401
        """Report; the step ends here, after the optimizer."""
        step_s, trainer = self._gate.step_s, self.trainer
        assert trainer is not None
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        trainer._metrics["train"].clear()
        step = {
            "step": step_s,
            "generate": trainer.generate_s,
            "update": step_s - self._prepared_s - trainer.prepare_s,
            "response_tokens": metrics["completions/mean_length"],
            "prompt_tokens": trainer.prompt_tokens,
            "reward": metrics["reward"],
            "entropy": metrics["entropy"],
        }
        control.should_training_stop = not self._gate.end_step(step)


def exact_match(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """Score as hybridrl's built-in reward of the same name."""
    pairs = zip(completions, answer, strict=True)
    return [float(completion.strip() == wanted.strip()) for completion, wanted in pairs]


def main() -> None:
    gate, settings, extras = open_gate()
    rows = [json.loads(line) for line in Path(settings["rows"]).read_text().splitlines()]
    callback = PassesGate(gate)
    callback.trainer = TimedTrainer(
        model=settings["model"],
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=exact_match,
        train_dataset=Dataset.from_list(rows),
        args=build_arguments(settings, read_extras(extras)),
        callbacks=[callback],
    )
    callback.trainer.train()


def read_extras(words: list[str]) -> dict[str, Any]:
    """Read options such as ``cache_implementation="static"``."""
    pairs = (word.partition("=") for word in words)
    return {key: json.loads(value) for key, _, value in pairs}


def build_arguments(settings: dict[str, Any], extras: dict[str, Any]) -> GRPOConfig:
    """Say the same to GRPOTrainer as side_hybridrl says to hybridrl, and switch extras off."""
    optimizer = settings["optimizer"]
    return GRPOConfig(
        output_dir=settings["scratch"],
        per_device_train_batch_size=settings["num_prompts"] * settings["num_responses"],
        num_generations=settings["num_responses"],
        gradient_accumulation_steps=1,
        steps_per_generation=1,
        num_iterations=1,
        max_completion_length=settings["max_response_tokens"],
        max_steps=settings["num_steps"],
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        epsilon=0.2,
        scale_rewards="group",
        loss_type="dapo",  # the mean over all response tokens of the step
        mask_truncated_completions=False,
        disable_dropout=True,
        learning_rate=optimizer["lr"],
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["max_grad_norm"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        dataloader_num_workers=0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
        **extras,
    )


if __name__ == "__main__":
    main()
