"""Rules for keys of other frameworks whose meaning depends on further keys of a command.

A rule is a function of the command and a typed value. Like the texts of ``port.yaml`` it gives what
to write: assignments, ``out WHY`` where nothing need be written, ``none WHY`` where nothing can be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yaml import YAMLError

from hybridrl.config.checks.data import SUFFIXES
from hybridrl.config.foreign.names import foreign_keys
from hybridrl.config.foreign.scripts import Typed
from hybridrl.config.foreign.spelling import read_yaml
from hybridrl.config.trainer import TRACKER_MODULES

Rule = Callable[["Command", str], str]

_SLIME_EVAL = {
    "n_samples_per_eval_prompt": "num_responses_per_prompt",
    "max_response_len": "max_response_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
}

MOST_STEPS = 10**9
"""Steps of a run that ends with its epochs."""

_DEVICES_OF_NODE = 8

_MATHS = ("math", "dapo", "aime", "deepscaler", "numina", "orz")

_OF_OTHERS = re.compile(r"critic\.|reward_model\.rollout\.|actor_rollout_ref\.ref\.")
"""Keys with the last words of those of the policy."""


class UnknownNumber(ValueError):
    """A rule asks for a number that is typed, and no number before the script runs."""


@dataclass(frozen=True, slots=True)
class Command:
    """All that the user typed, by the names of the framework."""

    framework: str
    typed: Sequence[Typed]

    def get(self, *names: str, default: str = "") -> str:
        """Return the value, typed last, of the first of these keys, named by their last words."""
        for name in names:
            for one in reversed(self.typed):
                of_policy = not _OF_OTHERS.match(one.name) and one.name.endswith("." + name)
                if one.name == name or of_policy:
                    return one.value
        return default

    def number(self, *names: str, default: float = 0) -> float:
        """Return a typed number, ``default`` without one; UnknownNumber: only the script has it."""
        text = self.get(*names)
        try:
            return default if text.lower() in ("", "null", "none") else float(text)
        except ValueError:
            name = next(name for name in names if self.get(name))
            raise UnknownNumber(f"it depends on {name}={text}") from None

    @property
    def num_row_tokens(self) -> int:
        """Prompt and response of full length."""
        usual = 1024 if self.framework == "openrlhf" else 512
        prompt = self.number("max_prompt_length", "prompt_max_len", default=usual)
        names = ("max_response_length", "generate_max_len", "max_completion_length")
        both = prompt + self.number(*names, default=usual)
        return int(self.number("data.max_len", default=both))

    @property
    def num_ranks(self) -> float:
        """Devices that train."""
        per_node = self.number("trainer.n_gpus_per_node", default=8)
        return per_node * self.number("trainer.nnodes", default=1)

    @property
    def num_samples(self) -> float:
        """Responses to a prompt."""
        names = ("n_samples_per_prompt", "num_generations", "rollout.n")
        return self.number(*names, default=8 if self.framework == "trl" else 1)

    @property
    def num_prompts(self) -> float:
        """Prompts of a step of verl; where it trains beside engines, those between two syncs."""
        updates = self.number("trigger_parameter_sync_step")
        if not updates:
            return self.number("train_batch_size", default=1024)
        batches = self.number("require_batches", default=1)
        return updates * batches * self.number("ppo_mini_batch_size", default=256)

    @property
    def own_engines(self) -> tuple[float, float]:
        """Devices of all engines that have their own, and of one of them; 0: there are none."""
        if self.framework == "verl" and self.get("hybrid_engine").lower() == "false":
            devices = self.number("rollout.n_gpus_per_node", default=8)
            devices *= self.number("rollout.nnodes", default=1)
            return devices, self.number("rollout.tensor_model_parallel_size", default=2)
        if self.framework == "slime" and not is_on(self.get("colocate")):
            per_engine = self.number("rollout_num_gpus_per_engine", default=1)
            return self.number("rollout_num_gpus"), per_engine
        if self.framework == "openrlhf" and not is_on(self.get("colocate_all_models")):
            per_engine = self.number("vllm_tensor_parallel_size", default=1)
            return self.number("vllm_num_engines") * per_engine, per_engine
        return 0, 0

    @property
    def ranks(self) -> tuple[float, float]:
        """Machines, and devices of each that train."""
        nodes = self.number("trainer.nnodes", "actor_num_nodes", default=1)
        return nodes, self.number("trainer.n_gpus_per_node", "actor_num_gpus_per_node", default=8)

    @property
    def has_engines_beside(self) -> bool:
        """Whether each machine has devices for engines beside its ranks; here none has no ranks."""
        devices, _ = self.own_engines
        if not devices:
            return False
        nodes, ranks = self.ranks
        return not devices % nodes and ranks + devices / nodes <= _DEVICES_OF_NODE


def is_on(value: str) -> bool:
    """Return whether a typed value switches something on: no 0, false or null."""
    try:
        return float(value) != 0
    except ValueError:
        return value.lower() not in ("", "false", "null", "none")


def list_of(text: str) -> list[str]:
    """Return the entries of ``a``, ``a,b``, ``a b`` or ``['a','b']``."""
    words = (word.strip("'\"") for word in re.split(r"[\s,]+", text.strip("[]()")))
    return [word for word in words if word]


def _share(total: float, part: float, key: str) -> str:
    count = total / part
    if count < 1 or count != int(count):
        return f"none {key} counts parts of a rollout, and {total:.9g} / {part:.9g} does not divide"
    return f"{key}={int(count)}"


def _rule_minibatches_of_prompts(command: Command, value: str) -> str:
    prompts_of_update = float(value) * command.number("require_batches", default=1)
    return _share(command.num_prompts, prompts_of_update, "algorithm.num_minibatches")


def _rule_minibatches_of_critic(command: Command, value: str) -> str:
    return _share(command.num_prompts, float(value), "critic.num_minibatches")


def _rule_minibatches_of_responses(command: Command, value: str) -> str:
    prompts = command.number("rollout_batch_size", default=1024)
    return _share(prompts * command.num_samples, float(value), "algorithm.num_minibatches")


def _rule_prompts(command: Command, value: str) -> str:
    if not command.number("trigger_parameter_sync_step"):
        return f"trainer.num_prompts_per_step={value}"
    return f"trainer.num_prompts_per_step={int(command.num_prompts)}"


def _rule_steps_of_prompts(command: Command, value: str) -> str:
    return f"trainer.num_steps={math.ceil(float(value) / command.num_prompts)}"


def _rule_own_engines(command: Command, value: str) -> str:
    devices, per_engine = command.own_engines
    if not devices:
        return "out engines are on the devices of the ranks"
    nodes, ranks = command.ranks
    if not command.has_engines_beside:
        return (
            f"none engines on {devices:g} devices do not fit beside {nodes:g} x {ranks:g} ranks: "
            "with serving=own each of cluster.num_nodes has cluster.num_ranks_per_node and "
            "serving.num_devices_per_node"
        )
    group = "serving.models.policy.groups.main"
    ahead = " trainer.max_staleness=1" * (command.framework == "verl")
    return (
        f"serving=own serving.num_devices_per_node={devices / nodes:g} "
        f"{group}.num_devices={devices:g} {group}.devices_per_engine={per_engine:g} "
        f"serving.weights=broadcast rollout.sleep=false{ahead}"
    )


def _rule_devices_of_engine(command: Command, value: str) -> str:
    if command.has_engines_beside:
        return "out devices_per_engine of the group has it"
    return f"rollout.tensor_parallel_size={value}"


def _rule_ahead(command: Command, value: str) -> str:
    """slime's train_async.py also runs fine-tuning, which samples nothing."""
    if not command.has_engines_beside:
        return "out the ranks have the engines"
    return "trainer.max_staleness=1 serving.on_update=finish"


def _rule_deltas(command: Command, value: str) -> str:
    if value == "full" or not command.has_engines_beside:
        return "out all weights are sent"
    return "serving.weight_deltas=true"


def _rule_tokens_of_rows(command: Command, value: str) -> str:
    if command.get("use_dynamic_bsz", "use_dynamic_batch").lower() == "true":
        return "out micro-batches are packed by tokens"
    return f"actor.max_tokens_per_microbatch={int(float(value)) * command.num_row_tokens}"


def _rule_tokens_of_all_rows(command: Command, value: str) -> str:
    rows = max(1, int(float(value) / command.num_ranks))
    return _rule_tokens_of_rows(command, str(rows))


def _rule_tokens_of_ranks(command: Command, value: str) -> str:
    names = ("context_parallel_size", "actor.ulysses_sequence_parallel_size")
    ranks = command.number(*names, default=1)
    return f"actor.max_tokens_per_microbatch={int(float(value) * ranks)}"


def _rule_overlong(command: Command, value: str) -> str:
    if command.get("filter_overlong_prompts").lower() == "true":
        return "data.overlong_prompts=drop"
    cut = command.get("data.truncation", default="error")
    known = {"error": "error", "left": "keep_end"}
    return f"data.overlong_prompts={known[cut]}" if cut in known else f"none no cut at the {cut}"


def _rule_verl_rows(command: Command, value: str) -> str:
    files = ",".join(files_of(value, "train"))
    return f"data.train_files=[{files}] {_reward_of(command, value)}".strip()


def files_of(value: str, split: str) -> list[str]:
    """Return the files of a list; of a dataset of the hub the one to save it in."""
    return [
        each if Path(each).suffix in SUFFIXES else f"data/{each.rpartition('/')[2]}/{split}.parquet"
        for each in list_of(value)
    ]


def _estimator(command: Command) -> str:
    usual = "grpo" if command.framework == "slime" else "gae"
    return command.get("adv_estimator", "advantage_estimator", default=usual)


def _gae(number: str) -> Rule:
    def rule(command: Command, value: str) -> str:
        estimator = _estimator(command)
        if estimator not in ("gae", "ppo"):
            return f"out {estimator} has no such number"
        return f"algorithm.advantage_args.{number}={value}"

    return rule


def _reward_of(command: Command, files: str) -> str:
    """Return the reward of verl by data source, as far as file names say it."""
    own = command.get("custom_reward_function.path")
    if not own and _has_reward_model(command):
        return ""
    if own:
        name = command.get("custom_reward_function.name", default="compute_score")
        return f"reward.function={own}:{name}"
    names = list_of(files.lower())
    if any("gsm8k" not in name and any(word in name for word in _MATHS) for name in names):
        return "reward=math"  # of GSM8K beside it, too
    has_numbers = any("gsm8k" in name for name in names)
    return "reward.function=numeric" if has_numbers else ""  # the last number of the response


def _has_reward_model(command: Command) -> bool:
    return is_on(command.get("reward_model.enable")) and bool(
        command.get("reward_model.model.path")
    )


def _rule_verl_reward_model(command: Command, value: str) -> str:
    if not _has_reward_model(command):
        return "out reward_model.enable switches it on"
    if command.get("custom_reward_function.path"):
        return "none your function asks it: serving.models.judge.path=FOLDER serves a frozen model"
    return f"reward.function=model reward.args.path={folder_of(value)}"


def _rule_own_reward(command: Command, value: str) -> str:
    """Return the file of a function in a module; mode=check names the line that calls it."""
    module, _, name = value.rpartition(".")
    return f"reward.function={module.replace('.', '/')}.py:{name}"


def _rule_metadata(command: Command, value: str) -> str:
    if command.get("custom_generate_function_path"):
        return f"none agent.columns=[{value}] with your class as agent.loop"
    return "out a reward function gets it by naming it"


def _rule_rm_type(command: Command, value: str) -> str:
    return "reward=math" if value in _MATHS else f"none reward.function=FILE.py:NAME for {value}"


def _rule_estimator(command: Command, value: str) -> str:
    names = foreign_keys().typed["adv_estimator"]
    name = names.get(value)
    if name in ("rloo", "remax", "opo", "gpg"):  # there with the loss of PPO, here with their own
        return f"algorithm=grpo algorithm.advantage={name}"
    if name == "dr_grpo":  # its loss is chosen apart
        return "algorithm=grpo algorithm.advantage_args.scale=none"
    return f"algorithm={name}" if name else f"none there is no estimator {value} here"


def _kl(command: Command, placement: str, coefficient: str) -> str:
    if not is_on(coefficient):
        return "out no KL penalty"
    return f"algorithm.kl.placement={placement} algorithm.kl.coefficient={coefficient}"


def _rule_kl_in_loss(command: Command, value: str) -> str:
    if not is_on(command.get("use_kl_loss")):
        return "out no KL penalty in the loss"
    coefficient = "0.001" if command.framework == "verl" else "0"
    return _kl(command, "loss", command.get("kl_loss_coef", default=coefficient))


def _rule_kl_in_reward(command: Command, value: str) -> str:
    if command.framework == "verl" and not is_on(command.get("use_kl_in_reward")):
        return "out no KL penalty in rewards"
    return _kl(command, "reward", command.get("kl_ctrl.kl_coef", "kl_coef", default="0.001"))


def _rule_kl_openrlhf(command: Command, value: str) -> str:
    placement = "loss" if is_on(command.get("use_kl_loss")) else "reward"
    return _kl(command, placement, command.get("init_kl_coef", default="0.01"))


def _rule_kl_type(command: Command, value: str) -> str:
    in_loss = is_on(command.get("use_kl_loss"))
    in_loss &= is_on(command.get("kl_loss_coef", default="0.001" * (command.framework == "verl")))
    if command.framework == "openrlhf":
        in_loss = is_on(command.get("init_kl_coef", default="0.01"))
    in_reward = command.framework == "slime" and is_on(command.get("kl_coef"))
    return _estimate(value) if in_loss or in_reward else "out no KL penalty in the loss"


def _estimate(name: str) -> str:
    plain = name.removesuffix("+")
    meant = foreign_keys().typed["kl_loss_type"].get(plain, plain)
    gradient = " algorithm.kl.gradient=k2" * (plain != name)
    return f"algorithm.kl.estimator={meant}{gradient}"


def _rule_kl_type_in_reward(command: Command, value: str) -> str:
    has_penalty = is_on(command.get("use_kl_in_reward"))
    return _estimate(value) if has_penalty else "out no KL penalty in rewards"


def _rule_kl_target(command: Command, value: str) -> str:
    if not is_on(command.get("use_kl_in_reward")) or command.get("kl_ctrl.type") != "adaptive":
        return "out the coefficient is fixed"
    return f"algorithm.kl.target_nats={command.get('kl_ctrl.target_kl', default='0.1')}"


def _rule_aggregation(command: Command, value: str) -> str:
    loss = command.get("policy_loss.loss_mode")
    if loss in ("gspo", "sapo", "geo_mean"):
        return f"out {loss} has the mean of sequences"
    return f"algorithm.loss_aggregation={foreign_keys().typed['loss_agg_mode'].get(value, value)}"


def _rule_clip(command: Command, value: str) -> str:
    sides = [f"algorithm.clip_{side}={value}" for side in ("low", "high")]
    typed = [bool(command.get(f"clip_ratio_{side}")) for side in ("low", "high")]
    untyped = [text for text, is_typed in zip(sides, typed, strict=True) if not is_typed]
    return " ".join(untyped) or "out clip_ratio_low and clip_ratio_high replace it"


def _rule_soft_overlong(command: Command, value: str) -> str:
    if not is_on(command.get("overlong_buffer_cfg.enable", "overlong_buffer.enable")):
        return "out it is off"
    return f"algorithm.soft_overlong_tokens={value}"


def _rule_copies(command: Command, value: str) -> str:
    share, ranks = int(value), command.num_ranks
    if share <= 0 or share >= ranks:
        return "out all ranks share one copy"
    return _share(ranks, share, "actor.fsdp2.num_replicas")


def _rank_of_adapter(command: Command) -> float:
    return command.number("lora_rank", "model.lora.rank")


def _rule_lora_alpha(command: Command, value: str) -> str:
    if _rank_of_adapter(command) <= 0:
        return "out there is no adapter"
    return f"lora=default lora.alpha={value}"


def _rule_lora_modules(command: Command, value: str) -> str:
    if _rank_of_adapter(command) <= 0:
        return "out there is no adapter"
    names = list_of(value)
    if any(name.startswith("linear_") for name in names):
        return "none set lora.target_modules to names of Hugging Face, as [q_proj,o_proj]"
    return f"lora=default lora.target_modules=[{','.join(names)}]"


def _rule_turns(command: Command, value: str) -> str:
    ends = [command.number("max_assistant_turns"), command.number("max_user_turns") + 1]
    ends = [end for end, least in zip(ends, (0, 1), strict=True) if end > least]
    return f"agent.max_turns={int(min(ends))}" if ends else "out there is no limit"


def _corrects(command: Command) -> str:
    """Return the level of verl's weights; empty where there are none."""
    level = command.get("rollout_correction.rollout_is")
    is_bypassed = (
        is_on(command.get("bypass_mode"))
        and command.get("rollout_correction.loss_type", default="ppo_clip") == "ppo_clip"
    )  # its ratio is that of the sampler
    return "" if is_bypassed or not is_on(level) else level


_CORRECTION = "algorithm.rollout_correction=importance algorithm.rollout_correction_args"


def _rule_importance(command: Command, value: str) -> str:
    level = _corrects(command)
    return f"{_CORRECTION}.level={level}" if level else "out there are no weights"


def _rule_importance_threshold(command: Command, value: str) -> str:
    if not _corrects(command):
        return "out there are no weights"
    low, has_low, high = value.strip("'\"").rpartition("_")
    if not has_low:
        return f"algorithm.rollout_correction_args.high={value}"
    args = "algorithm.rollout_correction_args"
    return f"{args}.low={float(low)} {args}.high={float(high)} {args}.outside=mask"


def _rule_importance_normalize(command: Command, value: str) -> str:
    if not _corrects(command) or not is_on(value):
        return "out there are no weights, or they are used as they are"
    if is_on(command.get("bypass_mode")):
        return "none weights are normalized over a step, with algorithm.old_logprobs=recompute"
    return "algorithm.rollout_correction_args.normalize=true"


def _rule_rejection(command: Command, value: str) -> str:
    statistics = list_of(value) if is_on(value) else []
    ends = list_of(command.get("rollout_rs_threshold"))
    ends = ends * len(statistics) if len(ends) == 1 else ends
    if not statistics:
        return "out nothing is rejected"
    if len(ends) != len(statistics):
        return "none algorithm.rollout_correction_args.reject has rules as 0.5<=token_k1<=2"
    bounds = (end.rpartition("_") for end in ends)
    rules = [
        f"{low}{'<=' if low else ''}{name}<={high}"
        for name, (low, _, high) in zip(statistics, bounds, strict=True)
    ]
    level = "" if _corrects(command) else " algorithm.rollout_correction_args.level=none"
    return f"{_CORRECTION}.reject={','.join(rules)}{level}"


def _rule_bypass(command: Command, value: str) -> str:
    if not is_on(value):
        return "out trainers compute the old log-probs"
    is_plain = command.get("rollout_correction.loss_type") == "reinforce"
    return "algorithm.old_logprobs=sampler" + " algorithm.policy_loss=reinforce" * is_plain


def _rule_openrlhf_correction(command: Command, value: str) -> str:
    if not is_on(command.get("enable_vllm_is_correction")):
        return "out there is no correction"
    ends = command.get("vllm_is_truncated_threshold", default="0.5 5.0").split()
    low, high = float(ends[0]), float(ends[-1])
    args = "algorithm.rollout_correction_args"
    kind = command.get("is_correction_type", default="tis")
    if kind == "seq-mask-tis":
        return f"{_CORRECTION}.high=1000000 {args}.reject={1 / high:g}<=seq_mean_k1<={1 / low:g}"
    return f"{_CORRECTION}.low={low} {args}.high={high}" + f" {args}.outside=mask" * (kind != "tis")


def _rule_mean_within(command: Command, value: str) -> str:
    if not is_on(command.get("dynamic_filtering")):
        return "out groups are not filtered"
    low, high = (
        float(end) for end in command.get("dynamic_filtering_reward_range", default="0 1").split()
    )
    args = "algorithm.group_filter_args"
    return (
        f"algorithm.group_filter=mean_within {args}.low={low} {args}.high={high} "
        "algorithm.max_sampling_rounds=100"
    )


def _rule_slime_filter(command: Command, value: str) -> str:
    if "nonzero_std" not in value:
        return "none algorithm.group_filter=FILE.py:NAME, a function of rewards_B and group_B"
    return "algorithm.group_filter=zero_variance algorithm.max_sampling_rounds=100"


def _rule_slime_whiten(command: Command, value: str) -> str:
    estimator = _estimator(command)
    if estimator == "ppo":
        return f"algorithm.advantage_args.whiten={str(is_on(value)).lower()}"
    if estimator.startswith("reinforce_plus_plus") or not is_on(value):
        return "out it is so"
    return (
        f"none {estimator} is not whitened; algorithm.advantage_args.scale=batch divides by the std"
    )


def _rule_least_lr(command: Command, value: str) -> str:
    return f"actor.optimizer.min_lr_ratio={float(value) / command.number('lr', default=1e-6):g}"


def _rule_slime_images(command: Command, value: str) -> str:
    column = re.search(r"\bimages?['\"]?\s*:\s*['\"]?(\w+)", value)
    return (
        f"data.images_key={column[1]}" if column else "none data.images_key=NAME names the column"
    )


def _rule_as_sampled(command: Command, value: str) -> str:
    """An evaluation samples as training does."""
    return f"eval.{value}={command.number('rollout_' + value, value, default=1.0):g}"


def _rule_eval_samples(command: Command, value: str) -> str:
    """An evaluation samples as often as training does."""
    return f"eval.num_responses_per_prompt={command.num_samples:g}"


def _rule_trl_beta(command: Command, value: str) -> str:
    return _kl(command, "loss", value)


def _rule_group_filter(command: Command, value: str) -> str:
    if not is_on(value):
        return "out groups are not filtered"
    rounds = int(command.number("max_num_gen_batches")) or 100
    return f"algorithm.group_filter=zero_variance algorithm.max_sampling_rounds={rounds}"


def folder_of(model: str) -> str:
    """Return a folder; of a name on the Hugging Face Hub the one to download it to."""
    is_on_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", model) and not Path(model).exists()
    return f"models/{model.rpartition('/')[2]}" if is_on_hub else model


def _rule_trl_loss(command: Command, value: str) -> str:
    meant = foreign_keys().typed["loss_type"].get(value, "")
    if meant.startswith("set "):
        return meant.removeprefix("set ")
    return f"algorithm.loss_aggregation={meant}" if meant else f"none no loss is called {value}"


def _rule_trackers(command: Command, value: str) -> str:
    known = [name for name in list_of(value) if name in TRACKER_MODULES]
    return f"tracking.trackers=[{','.join(dict.fromkeys(['tensorboard', *known]))}]"


def _rule_epochs(command: Command, value: str) -> str:
    steps = command.number("total_training_steps", "num_rollout", "max_steps", default=0)
    if steps > 0:
        return f"trainer.num_epochs={value}"
    return f"trainer.num_steps={MOST_STEPS} trainer.num_epochs={value}"


def _rule_slime_eval(command: Command, value: str) -> str:
    pairs = re.findall(r"([A-Za-z][\w-]*)\s+(\S+)", value)
    pairs = pairs or [("aime", value)] * (len(value.split()) == 1)
    sets = " ".join(f"eval.sets.{name}.files=[{file}]" for name, file in pairs)
    return sets or "none it should be NAME FILE"


def _rule_slime_eval_config(command: Command, value: str) -> str:
    """Write the sets of a file, each with the file's defaults."""
    try:
        tree: Any = read_yaml(Path(value).read_text(encoding="utf-8"))
        tree = tree.get("eval", tree)
        sets = tree["datasets"]
        if isinstance(sets, dict):
            sets = [{"name": name, **one} for name, one in sets.items()]
        sets = [{**tree.get("defaults", {}), **one} for one in sets]
        files = [f"eval.sets.{one['name']}.files=[{one['path']}]" for one in sets]
    except (OSError, YAMLError, LookupError, TypeError, AttributeError):
        return "none eval.sets.NAME.files=[FILE] is a set; no file of sets can be read there"
    numbers = [
        f"eval.sets.{one['name']}.{key}={one[name]}"
        for one in sets
        for name, key in _SLIME_EVAL.items()
        if one.get(name) is not None
    ]
    return " ".join([*files, *numbers])


def _rule_eps_clip(command: Command, value: str) -> str:
    has_high = command.get("eps_clip_high", "epsilon_high")
    if command.get("eps_clip_low_high"):
        return "out eps_clip_low_high replaces it"
    if command.framework == "trl" and command.get("loss_type") == "cispo":
        return "out cispo has no lower end"
    return f"algorithm.clip_low={value}" + (f" algorithm.clip_high={value}" * (not has_high))


def _rule_clips(command: Command, value: str) -> str:
    low, high = (float(word) for word in value.split())
    return f"algorithm.clip_low={low} algorithm.clip_high={high}"


def _rule_betas(command: Command, value: str) -> str:
    first, second = (float(word) for word in value.split())
    return f"actor.optimizer.beta1={first} actor.optimizer.beta2={second}"


def _rule_max_len(command: Command, value: str) -> str:
    response = command.number("generate_max_len", "rollout_max_response_len")
    if not 0 < response < float(value):
        return "none data.max_prompt_tokens and rollout.max_response_tokens share it; set both"
    if command.get("rollout_max_prompt_len"):
        return "out it is data.max_prompt_tokens + rollout.max_response_tokens"
    return f"data.max_prompt_tokens={int(float(value) - response)}"


def _trl_rows(command: Command) -> tuple[float, float]:
    """Return responses of a rollout, and of an update."""
    per_device = command.number("per_device_train_batch_size", default=8)
    per_device *= command.number("num_processes", default=1)
    accumulated = command.number("gradient_accumulation_steps", default=1)
    steps = command.number("steps_per_generation", default=accumulated)
    rows = command.number("generation_batch_size", default=per_device * steps)
    return rows, min(rows, per_device * accumulated)


def _rule_trl_batches(command: Command, value: str) -> str:
    per_device = command.number("per_device_train_batch_size", default=8)
    rows, update = _trl_rows(command)
    counts = [
        _share(rows, command.num_samples, "trainer.num_prompts_per_step"),
        _share(rows, update, "algorithm.num_minibatches"),
    ]
    tokens = int(per_device) * command.num_row_tokens
    ranks = int(command.number("num_processes", default=1))
    return next(
        (text for text in counts if text.startswith("none")),
        f"{' '.join(counts)} cluster.num_ranks_per_node={ranks} "
        f"actor.max_tokens_per_microbatch={tokens}",
    )


def _trl_steps(key: str) -> Rule:
    def rule(command: Command, value: str) -> str:
        """TRL counts updates, of which a rollout has several."""
        rows, update = _trl_rows(command)
        updates = rows / update * command.number("num_iterations", default=1)
        if float(value) < 1:
            return f"none {key} counts steps" if float(value) > 0 else f"{key}=0"
        return f"{key}={max(1, math.ceil(float(value) / updates))}"

    return rule


def _rule_trl_max_steps(command: Command, value: str) -> str:
    if float(value) <= 0:
        return "out epochs say when to end"
    return _trl_steps("trainer.num_steps")(command, value)


def _rule_trl_save_steps(command: Command, value: str) -> str:
    strategy = command.get("save_strategy", default="steps")
    if strategy != "steps":
        return "checkpoint.every_num_steps=0"
    return _trl_steps("checkpoint.every_num_steps")(command, value)


def _rule_trl_eval_steps(command: Command, value: str) -> str:
    if command.get("eval_strategy", default="no") != "steps":
        return "eval.every_num_steps=0"
    return _trl_steps("eval.every_num_steps")(command, value)


def _rule_trl_clip_high(command: Command, value: str) -> str:
    if command.get("loss_type") == "cispo":  # a cap of the ratio itself
        return f"algorithm.clip_high={float(value) - 1:g}"
    return f"algorithm.clip_high={value}"


def _rule_trl_correction(command: Command, value: str) -> str:
    if command.get("vllm_importance_sampling_correction").lower() == "false":
        return "out tokens are not corrected"
    mode = command.get("vllm_importance_sampling_mode", default="sequence_mask")
    level, _, outside = mode.partition("_")
    names = ("vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap")
    args = "algorithm.rollout_correction_args"
    low = command.number("vllm_importance_sampling_clip_min")
    return (
        f"{_CORRECTION}.level={level} {args}.outside={outside} "
        f"{args}.high={command.number(*names, default=3.0):g} {args}.low={low:g}"
    )


def _rule_remote_reward(command: Command, value: str) -> str:
    if value.endswith(".py"):
        return f"none reward.function={value}:NAME, a function of responses and answers"
    return f"reward.function=http reward.args.url={value}"


_rule_gamma = _gae("gamma")
_rule_lam = _gae("lam")

RULES: Mapping[str, Rule] = {
    name.removeprefix("_rule_"): rule
    for name, rule in globals().items()
    if name.startswith("_rule_")
}
"""By the name in ``port.yaml``."""
