"""Commands of other frameworks become recipes of the same meaning.

The scripts in ``scripts/`` have the keys of these files, shortened: verl's
examples/grpo_trainer/run_qwen3-8b.sh, recipe/dapo/run_dapo_qwen2.5_7b_math.sh and
examples/ppo_trainer/run_deepseek7b_llm.sh; slime's scripts/run-qwen3-4B.sh and
run-qwen3-30B-A3B.sh; TRL's quick start of GRPO; OpenRLHF's train_ppo_ray_hybrid_engine.sh.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from hybridrl.config.experiment import ExperimentConfig
from hybridrl.config.foreign.names import answer_key
from hybridrl.config.foreign.port import frameworks, port
from hybridrl.config.foreign.rules import RULES
from hybridrl.config.foreign.scripts import Typed, read_script
from hybridrl.config.foreign.spelling import to_override
from hybridrl.config.load import free_keys, known_keys, load_config
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.errors import ConfigErrors
from hybridrl.main import compose
from hybridrl.port import main
from tests.tiny_models import Family, make_tiny_model

GROUP = "serving.models.policy.groups.main"
SCRIPTS = Path(__file__).parent / "scripts"
MODELS = {
    "verl_gsm8k.sh": "Qwen3-8B",
    "verl_dapo.sh": "Qwen2.5-7B",
    "verl_ppo.sh": "deepseek-llm-7b-chat",
    "slime_qwen3_4b.sh": "Qwen3-4B",
    "slime_qwen3_30b_a3b.sh": "Qwen3-30B-A3B",
    "trl_grpo.py": "Qwen2.5-0.5B",
    "openrlhf_ppo.sh": "Llama-3-8b",
}
ROWS = (
    *("gsm8k/train.parquet", "gsm8k/test.parquet", "tldr/train.parquet", "train.jsonl"),
    *("dapo-math-17k.parquet", "aime-2024.parquet", "dapo-math-17k.jsonl", "aime-2024.jsonl"),
)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in SCRIPTS.iterdir():
        shutil.copy(file, tmp_path / file.name.removesuffix(".txt"))
    for name in ROWS:
        Path("data", name).parent.mkdir(parents=True, exist_ok=True)
        Path("data", name).write_text("rows")


def ported(script: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """The values of the recipe by dotted key, groups among them; and its text."""
    assert main([script, "--output", "recipe.yaml", *arguments]) == 0
    text = Path("recipe.yaml").read_text()
    tree = yaml.safe_load(text)
    groups = {
        key.removeprefix("override /"): name
        for group in tree.pop("defaults")
        for key, name in group.items()
    }
    return {**groups, **flat(tree)}, text


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in tree.items():
        is_node = isinstance(value, dict) and value
        values |= flat(value, f"{prefix}{name}.") if is_node else {prefix + name: value}
    return values


def checked(values: dict[str, Any], model: str) -> ExperimentConfig | None:
    """Load the recipe; None where nothing but packages is missing on this machine."""
    family: Family = "qwen3_moe" if "A3B" in model else "qwen3"
    sizes: dict[str, Any] = {"vocab_size": 260, "max_position_embeddings": 2**16}
    sizes |= {"num_experts": 8} if "A3B" in model else {}
    folder = make_tiny_model(Path("models", model), family, **sizes)
    settings = folder / "config.json"
    untied = settings.read_text().replace('embeddings": true', 'embeddings": false')
    settings.write_text(untied)
    tokenizer = build_starter_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    groups = [f"{key}={value}" for key, value in values.items() if "." not in key]
    keys = [f"++{key}={to_override(value)}" for key, value in values.items() if "." in key]
    try:
        return load_config(compose([*groups, *keys]))
    except ConfigErrors as errors:
        missing = [each for each in errors.violations if "not installed" in str(each)]
        assert list(errors.violations) == missing
        return None


MEANT: dict[str, dict[str, object]] = yaml.safe_load("""
verl_gsm8k.sh:
  reward.function: numeric  # by the rule `#### 42`, not exact_match
  trainer.num_epochs: 15
  trainer.num_steps: 1000000000
  rollout.sleep: true
  eval.num_prompts: 1048576  # all rows
  actor.optimizer.beta2: 0.999
  actor.optimizer.weight_decay: 0.01
  algorithm.policy_loss_args.dual_clip: 3.0
  algorithm.num_minibatches: 4
  algorithm.old_logprobs: recompute
  data.overlong_prompts: drop  # not the error of data.truncation
  data.answer_key: reward_model.ground_truth
  actor.fsdp2.cpu_offload: null
verl_dapo.sh:
  data.max_prompt_tokens: 2048
  rollout.max_response_tokens: 8192
  actor.fsdp2.context_parallel_size: 4
  actor.max_tokens_per_microbatch: 40960  # theirs are of one rank
  algorithm.soft_overlong_tokens: 4096
  algorithm.num_minibatches: 16
  algorithm.policy_loss_args.dual_clip: 10.0
  algorithm.clip_low: 0.2
  algorithm.clip_high: 0.28
  algorithm.group_filter: zero_variance
  algorithm.max_sampling_rounds: 10
  rollout.top_k: 0
  cluster.num_nodes: 8
  cluster.ray_address: auto
  data.overlong_prompts: keep_end
  algorithm.kl.coefficient: null
  eval.temperature: 1.0
verl_ppo.sh:
  algorithm: ppo
  critic.optimizer.lr: 1.0e-5
  critic.num_warmup_steps: 0
slime_qwen3_4b.sh:
  actor: megatron
  algorithm.num_minibatches: 1  # 32 x 8 responses, 256 an update
  rollout.max_response_tokens: 8192
  eval.max_response_tokens: 16384
  eval.sets.aime.files: [data/aime-2024.jsonl]
  algorithm.kl.coefficient: null  # --use-kl-loss with 0.00
  trainer.num_steps: 3000
  actor.optimizer.beta2: 0.98
  actor.max_tokens_per_microbatch: 10240
slime_qwen3_30b_a3b.sh:
  megatron.expert_parallel_size: 8
  megatron.optimizer_args.optimizer_cpu_offload: true
trl_grpo.py:
  trainer.num_prompts_per_step: 4  # 4 x 8 responses, 8 to a prompt
  algorithm.loss_aggregation: token_mean
  algorithm.kl.coefficient: 0.04
  data.train_files: [data/tldr/train.parquet]
openrlhf_ppo.sh:
  algorithm: grpo
  algorithm.num_minibatches: 8
  actor.optimizer.lr: 5.0e-7
  algorithm.kl.placement: loss
  algorithm.advantage_args.gamma: null  # GRPO has none
""")
NOTES = {
    "verl_gsm8k.sh": (
        "num_minibatches: 4  # actor_rollout_ref.actor.ppo_mini_batch_size=256",
        "#   actor_rollout_ref.ref.fsdp_config.param_offload=True: the reference alone",
    ),
    "slime_qwen3_4b.sh": (
        "--load /root/Qwen3-4B_slime/: the same command",
        "2048  # slime's default of rollout_max_prompt_len, which is none",
    ),
    "slime_qwen3_30b_a3b.sh": ("$(seq 16 8 256)",),
    "trl_grpo.py": ("a cosine schedule ends with trainer.num_steps",),
    "openrlhf_ppo.sh": ("--remote_rm_url reward_func.py: reward.function=reward_func.py:NAME",),
}


@pytest.mark.parametrize("script", MODELS)
def test_a_ported_command_keeps_its_meaning_and_passes_the_check_in_one_round(script: str) -> None:
    values, text = ported(script)
    assert {key: values.get(key) for key in MEANT[script]} == MEANT[script]
    assert [note for note in NOTES.get(script, ()) if note not in text] == []
    has_critic = any(key.startswith("critic.") for key in values)
    assert has_critic == (values.get("algorithm") == "ppo")
    checked(values, MODELS[script])


def test_slimes_engines_beside_the_ranks_sample_a_step_ahead_and_pass_the_check() -> None:
    script = Path("slime_qwen3_4b.sh")
    text = script.read_text().replace("train.py", "train_async.py")
    text = text.replace("--colocate", "--rollout-num-gpus 4").replace("per-node 8", "per-node 4")
    script.write_text(text)
    values, _ = ported(script.name)
    assert (values["trainer.max_staleness"], values["serving.on_update"]) == (1, "finish")
    assert values["algorithm.rollout_correction_args.level"] == "none"  # as there
    checked(values, "Qwen3-4B")


def test_a_file_of_slimes_evaluation_sets_is_read_with_its_defaults() -> None:
    Path("sets.yaml").write_text(
        "eval:\n  defaults: {max_response_len: 16384, top_p: 0.7}\n  datasets:\n"
        "    - {name: aime, path: /data/aime.jsonl, rm_type: math, n_samples_per_eval_prompt: 16}\n"
        "    - {name: gpqa, path: /data/gpqa.jsonl, max_response_len: 900, temperature: null}\n"
    )
    values, _ = written("train.py --eval-config sets.yaml", framework="slime")
    assert {key: value for key, value in values.items() if key.startswith("eval.sets.")} == {
        "eval.sets.aime.files": ["/data/aime.jsonl"],
        "eval.sets.aime.num_responses_per_prompt": 16,
        "eval.sets.aime.max_response_tokens": 16384,
        "eval.sets.aime.top_p": 0.7,
        "eval.sets.gpqa.files": ["/data/gpqa.jsonl"],
        "eval.sets.gpqa.max_response_tokens": 900,
        "eval.sets.gpqa.top_p": 0.7,
    }
    for text in ("{", "eval: [1]", "eval: {datasets: [{name: a}]}", "eval: {datasets: 7}"):
        Path("sets.yaml").write_text(text)
        _, recipe = written("train.py --eval-config sets.yaml", framework="slime")
        assert "--eval-config sets.yaml: eval.sets.NAME.files=[FILE] is a set" in recipe


VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=5 "
)


def written(text: str, suffix: str = ".sh", *, framework: str) -> tuple[dict[str, Any], str]:
    """The values that a script's text becomes, and the text of the recipe."""
    recipe = port(framework, read_script(text, suffix=suffix))
    groups = {key: name for key, (name, _) in recipe.groups.items()}
    return {**groups, **{key: value for key, (value, _) in recipe.values.items()}}, recipe.text("")


def test_variables_of_the_environment_are_read_where_the_recipe_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=['$(pwd)/test.parquet']"
    outside = "trainer.nnodes=$NODES trainer.project_name=x-$(date) data.max_prompt_length=$lower"
    values, text = written(f"srun --nodes 2 {VERL} {files} {outside}", framework="verl")
    assert "--nodes" not in text
    assert values["data.train_files"] == ["${oc.env:HOME}/data/gsm8k/train.parquet"]
    assert values["data.eval_files"] == ["${oc.env:PWD}/test.parquet"]
    assert values["reward.function"] == "numeric"
    assert values["cluster.num_nodes"] == "${oc.decode:${oc.env:NODES}}"
    left = text.partition("# Without a counterpart:")[2]
    assert "$(date) is known to the shell alone" in left
    assert "$lower is known to the shell alone" in left
    monkeypatch.setenv("NODES", "2")
    monkeypatch.setenv("HOME", "/home/me")
    read = OmegaConf.to_container(OmegaConf.create(yaml.safe_load(text)), resolve=True)
    assert flat(read)["cluster.num_nodes"] == 2  # type: ignore[arg-type]
    assert flat(read)["data.train_files"] == ["/home/me/data/gsm8k/train.parquet"]  # type: ignore[arg-type]


def test_no_default_takes_the_place_of_a_number_that_the_environment_has() -> None:
    typed = f"{BESIDE} data.train_batch_size=$BATCH {VERL_ACTOR}.ppo_mini_batch_size=64"
    values, text = written(f"{VERL} {typed} rollout.n_gpus_per_node=$GPUS", framework="verl")
    assert values["trainer.num_prompts_per_step"] == "${oc.decode:${oc.env:BATCH}}"
    left = text.partition("# Without a counterpart:")[2].partition("# Left out:")[0]
    assert re.search(r"hybrid_engine=False: it depends on rollout.n_gpus_per_node=\S+GPUS", left)
    assert re.search(r"mini_batch_size=64: it depends on train_batch_size=\S+BATCH", left)
    assert not {"serving", "algorithm.num_minibatches"} & values.keys()
    values, _ = written(f"{VERL} data.train_batch_size=1048575", framework="verl")
    assert values["trainer.num_prompts_per_step"] == 1048575


def test_quotes_over_several_lines_are_one_word_and_sums_are_nested() -> None:
    text = """ray job submit --runtime-env-json='{
         "env_vars": {"A": "it is"}
       }' \\
       -- python3 train.py \\
       ${ARGS[@]} --max-tokens-per-gpu $(((LENGTH + 2 * 1024) / 2 - 24))
    """
    arrays = "LENGTH=2048\nARGS=(\n  --hf-checkpoint /models/A\n  --rollout-batch-size 32\n)\n"
    values, _ = written(arrays + text, framework="slime")
    assert values["model.path"] == "/models/A"
    assert values["trainer.num_prompts_per_step"] == 32
    typed = {one.name: one.value for one in read_script(arrays + text, suffix=".sh")}
    assert typed["max_tokens_per_gpu"] == "2024"


def test_keys_in_branches_in_appended_variables_and_in_quotes_are_read() -> None:
    text = """backend=fsdp # or megatron
ROOT="$(cd -- "$(dirname -- "$0")" && pwd)"
ACTOR="
    actor_rollout_ref.actor.optim.lr=2e-6 \\
    actor_rollout_ref.actor.grad_clip=3"
if [[ $backend == "megatron" ]]; then
    if [ -d x ]; then echo x; fi
    ACTOR="$ACTOR actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
else
    ACTOR="$ACTOR actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"
fi
"""
    command = "python3 -m verl.trainer.main_ppo data.train_batch_size=64 $ACTOR"
    for line in (command, f'srun bash -c "{command}"', f'ray job submit -- {command} x="$ROOT/y"'):
        values, _ = written(text + line, framework="verl")
        assert values["actor.optimizer.lr"] == 2e-6
        assert values["actor.optimizer.max_grad_norm"] == 3
        assert values["actor.fsdp2.context_parallel_size"] == 2
        assert values["actor"] == "fsdp2"
        assert values["trainer.num_prompts_per_step"] == 64


def test_arguments_of_engines_and_of_megatron_are_handed_on() -> None:
    slime = "python train.py --hf-checkpoint A --rollout-batch-size 8 --sglang-ep-size 4"
    refused = "--sglang-enable-dp-lm-head --sglang-load-format auto --sglang-tp-size 2"
    own = "--custom-rm-path examples.search.reward.score"
    given = f"{slime} --sglang-enable-mixed-chunk {refused} {own}"
    values, text = written(given, framework="slime")
    assert values["reward.function"] == "examples/search/reward.py:score"
    assert values["rollout.engine_args.ep_size"] == 4
    assert values["rollout.engine_args.enable_mixed_chunk"] is True
    assert "rollout.engine_args.enable_dp_lm_head" not in values  # it needs several dp ranks
    assert "--sglang-load-format auto: it cannot be chosen: weights are sent" in text
    assert "--sglang-tp-size 2: set rollout.tensor_parallel_size" in text
    layout = "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    reference = "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=8"
    model = "+actor_rollout_ref.actor.megatron.override_transformer_config"
    values, text = written(
        f"{VERL} --config-name=ppo_megatron_trainer {layout} {reference} {model}.fp8=hybrid "
        f"{model}.recompute_granularity=full actor_rollout_ref.actor.use_torch_compile=True",
        framework="verl",
    )
    assert values["actor"] == "megatron"
    assert values["megatron.tensor_parallel_size"] == 2
    assert values["megatron.transformer_args.fp8"] == "hybrid"
    assert values["actor.gradient_checkpointing"] is True
    assert not [key for key in values if key.startswith("actor.fsdp2.")]
    assert "# Without a counterpart:" not in text


VERL_ACTOR = "actor_rollout_ref.actor"
BESIDE = (
    "actor_rollout_ref.hybrid_engine=False trainer.nnodes=2 trainer.n_gpus_per_node=6 "
    "rollout.nnodes=2 rollout.n_gpus_per_node=2"
)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        # Warm-up counts steps there, updates here: 1024 prompts of 256 are four a step.
        (f"{VERL_ACTOR}.optim.lr_warmup_steps=10", {"actor.optimizer.num_warmup_steps": 40}),
        ("global_profiler.steps=[2,4] global_profiler.tool=npu", {"trainer.profile_steps": [2, 4]}),
        (f"{VERL_ACTOR}.use_torch_compile=False", {"actor.fsdp2.kernels": None}),
        ("actor_rollout_ref.model.use_liger=False", {"actor.fsdp2.kernels": None}),
        ("trainer.val_only=False", {"mode": None}),
        ("actor_rollout_ref.model.lora_rank=0 actor_rollout_ref.model.lora_alpha=0 "
         "actor_rollout_ref.model.target_modules=all-linear", {"lora": None, "lora.alpha": None}),
        ("actor_rollout_ref.model.lora_rank=32", {"lora": "default", "lora.alpha": 16}),
        ("algorithm.kl_penalty=kl actor_rollout_ref.actor.use_kl_loss=True",
         {"algorithm.kl.estimator": None, "algorithm.kl.placement": "loss"}),
        ("algorithm.use_kl_in_reward=True", {"algorithm.kl.estimator": "k1"}),
        ("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.target_kl=0.1",
         {"algorithm.kl.target_nats": None}),
        (f"{VERL_ACTOR}.policy_loss.loss_mode=gspo {VERL_ACTOR}.loss_agg_mode=token-mean",
         {"algorithm.policy_loss": "gspo", "algorithm.clip_low": 0.2,
          "algorithm.loss_aggregation": "sequence_mean_token_mean",
          "algorithm.policy_loss_args.dual_clip": None}),
        (f"{VERL_ACTOR}.policy_loss.loss_mode=sapo {VERL_ACTOR}.tau_neg=1.1",
         {"algorithm.policy_loss_args.temperature_negative": 1.1, "algorithm.clip_low": None}),
        ("+reward_model.reward_kwargs.overlong_buffer_cfg.enable=False "
         "+reward_model.reward_kwargs.overlong_buffer_cfg.len=128",
         {"algorithm.soft_overlong_tokens": None}),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=0.6 "
         "reward_model.rollout.gpu_memory_utilization=0.8 rollout.n_gpus_per_node=2",
         {"rollout.memory_fraction": 0.6, "cluster.num_ranks_per_node": 8}),
        (f"{VERL_ACTOR}.ppo_mini_batch_size=384", {"algorithm.num_minibatches": None}),
        (f"{VERL_ACTOR}.ppo_micro_batch_size=16", {"actor.max_tokens_per_microbatch": 2048}),
        (f"{VERL_ACTOR}.fsdp_config.fsdp_size=2", {"actor.fsdp2.num_replicas": 4}),
        ("data.train_files=['a/gsm8k/train.parquet','a/math/train.parquet']",
         {"reward": "math", "reward.function": None}),
        ("reward_model.enable=True reward_model.model.path=A/B data.train_files=gsm8k.parquet",
         {"reward.function": "model", "reward.args.path": "models/B"}),
        ("actor_rollout_ref.rollout.multi_turn.max_user_turns=1 "
         "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5", {"agent.max_turns": 2}),
        ("algorithm.rollout_correction.rollout_is_threshold=3 "
         "algorithm.rollout_correction.rollout_is=sequence",
         {"algorithm.rollout_correction_args.level": "sequence",
          "algorithm.rollout_correction_args.high": 3, "algorithm.old_logprobs": "recompute"}),
        (f"algorithm.rollout_correction.bypass_mode=false {VERL_ACTOR}.ppo_mini_batch_size=1024",
         {"algorithm.old_logprobs": None}),
        (f"{VERL_ACTOR}.policy_loss.loss_mode=cispo {VERL_ACTOR}.clip_ratio_low=10",
         {"algorithm.clip_low": 1.0, "algorithm.clip_high": 0.2}),
        ("algorithm.rollout_correction.bypass_mode=true", {"algorithm.old_logprobs": "sampler"}),
        (f"{BESIDE} {VERL_ACTOR}.ppo_mini_batch_size=64",
         {"serving": "own", "serving.num_devices_per_node": 2, f"{GROUP}.num_devices": 4,
          f"{GROUP}.devices_per_engine": 2, "rollout.tensor_parallel_size": None,
          "trainer.max_staleness": 1, "algorithm.old_logprobs": "recompute",
          "algorithm.rollout_correction_args.level": "none", "algorithm.num_minibatches": 16}),
        (f"{BESIDE} data.train_batch_size=0 {VERL_ACTOR}.ppo_mini_batch_size=32 "
         "rollout.total_rollout_steps=51201 async_training.require_batches=2 "
         "async_training.trigger_parameter_sync_step=4 async_training.partial_rollout=True "
         "async_training.use_rollout_log_probs=True",
         {"trainer.num_prompts_per_step": 256, "algorithm.num_minibatches": 4,
          "trainer.num_steps": 201, "trainer.max_staleness": 1,
          "serving.on_update": "interrupt", "algorithm.old_logprobs": "sampler",
          "algorithm.rollout_correction": None}),
        ("algorithm.rollout_correction.rollout_rs=token_k1,seq_max_k2 "
         "algorithm.rollout_correction.rollout_rs_threshold=0.6_1.6,2.5",
         {"algorithm.rollout_correction_args.level": "none",
          "algorithm.rollout_correction_args.reject": "0.6<=token_k1<=1.6,seq_max_k2<=2.5"}),
        ("data.max_response_length=512 +actor_rollout_ref.rollout.val_kwargs.max_tokens=9000",
         {"eval.max_response_tokens": 9000, "rollout.max_response_tokens": 512}),
        ("+actor_rollout_ref.rollout.val_kwargs.response_length=9000",
         {"eval.max_response_tokens": 9000}),
        # What was typed may look like a place of the table, or be null.
        (f"actor_rollout_ref.model.path=<your_model> {VERL_ACTOR}.grad_clip=null",
         {"model.path": "<your_model>", "actor.optimizer.max_grad_norm": None}),
        ("algorithm.use_kl_in_reward=True", {"algorithm.old_logprobs": "recompute"}),
    ],
)  # fmt: skip
def test_a_key_of_verl_means_what_it_means_there(typed: str, wanted: dict[str, Any]) -> None:
    values, _ = written(f"{VERL} {typed}", framework="verl")
    assert {key: values.get(key) for key in wanted} == wanted


def test_an_estimator_of_verl_keeps_the_loss_of_ppo_and_a_critic_its_updates() -> None:
    command = VERL.replace("=grpo", "=rloo")
    values, _ = written(command, framework="verl")
    assert (values["algorithm"], values["algorithm.advantage"]) == ("grpo", "rloo")
    command = f"{VERL.replace('=grpo', '=gae')} critic.optim.lr_warmup_steps=7 critic.grad_clip=2"
    values, _ = written(
        f"{command} actor_rollout_ref.actor.ppo_mini_batch_size=64", framework="verl"
    )
    assert values["critic.num_minibatches"] == 16
    assert "actor.optimizer.num_warmup_steps" not in values
    assert "actor.optimizer.max_grad_norm" not in values


@pytest.mark.parametrize(
    ("framework", "typed", "wanted"),
    [
        ("slime", "--rollout-temperature 0.8", {
            "eval.temperature": 0.8, "data.shuffle": False, "data.prompt_key": "input",
            "algorithm.loss_aggregation": "sequence_mean_token_mean"}),
        ("slime", "--use-kl-loss --kl-loss-coef 0.1", {"algorithm.kl.estimator": "k1"}),
        ("slime", "--advantage-estimator ppo --lr 1e-6", {
            "algorithm.advantage_args.lam": 1.0, "algorithm.advantage_args.whiten": False,
            "critic.num_warmup_steps": 0, "critic.optimizer.lr": 1e-6}),
        ("slime", "--use-rollout-logprobs --num-steps-per-rollout 4", {
            "algorithm.old_logprobs": "sampler"}),
        ("slime", "--tis-clip 3 --use-tis --tis-clip-low 0.5", {
            "algorithm.rollout_correction_args.high": 3,
            "algorithm.rollout_correction_args.low": 0.5}),
        ("slime", "--eps-clip-high 0.28 --eps-clip 0.2", {
            "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28}),
        ("slime", "--lr 1e-5 --min-lr 1e-6", {"actor.optimizer.min_lr_ratio": 0.1}),
        ("slime", "--decoder-first-pipeline-num-layers 14 --no-offload-rollout", {
            "megatron.num_layers_in_first_stage": 14, "rollout.sleep": False}),
        ("slime", "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 "
         "--rollout-num-gpus-per-engine 2 --update-weight-mode delta", {
            "serving": "own", "serving.num_devices_per_node": 4, f"{GROUP}.num_devices": 4,
            f"{GROUP}.devices_per_engine": 2, "serving.weights": "broadcast",
            "serving.weight_deltas": True, "rollout.sleep": False,
            "rollout.tensor_parallel_size": None, "trainer.max_staleness": None}),
        ("slime", "--colocate --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 "
         "--update-weight-mode delta", {
            "serving": None, "rollout.tensor_parallel_size": 2, "rollout.sleep": True}),
        ("slime", "--actor-num-nodes 2 --rollout-num-gpus 16 --rollout-num-gpus-per-engine 4", {
            "serving": None, "rollout.tensor_parallel_size": 4}),  # no device is left on a node
        ("slime", "--rollout-num-gpus-per-engine 2", {  # it names no devices of engines
            "serving": None, "rollout.tensor_parallel_size": 2}),
        ("openrlhf", "--vllm.num_engines 2 --vllm.tensor_parallel_size 2 "
         "--actor.num_gpus_per_node 2", {
            "serving": "own", "serving.num_devices_per_node": 4, f"{GROUP}.num_devices": 4,
            f"{GROUP}.devices_per_engine": 2, "rollout.tensor_parallel_size": None}),
        ("openrlhf", "--actor.model_name_or_path A", {
            "eval.temperature": 0.6, "eval.num_responses_per_prompt": 4,
            "algorithm.kl.estimator": "k1", "algorithm.kl.coefficient": 0.01,
            "critic.num_warmup_steps": 0, "critic.num_minibatches": 8}),
        ("openrlhf", "--algo.advantage.is_correction_enable "
         "--algo.advantage.is_correction_type icepop", {
            "algorithm.rollout_correction_args.low": 0.5,
            "algorithm.rollout_correction_args.high": 5.0,
            "algorithm.rollout_correction_args.outside": "mask"}),
        ("openrlhf", "--algo.advantage.is_correction_enable "
         "--algo.advantage.is_correction_type seq-mask-tis", {
            "algorithm.rollout_correction_args.reject": "0.2<=seq_mean_k1<=2"}),
        ("openrlhf", "--critic.lr_scheduler constant --actor.policy_loss_type gspo", {
            "actor.optimizer.schedule": "cosine", "algorithm.policy_loss": "gspo",
            "algorithm.clip_high": 0.2}),
        # Its new names mean the same.
        ("openrlhf", "--actor.model_name_or_path OpenRLHF/Llama-3-8b --actor.num_gpus_per_node 4 "
         "--rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.batch_size 128 "
         "--actor.adam.lr 5e-7 --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 "
         "--algo.advantage.estimator group_norm --data.max_len 3072 --rollout.max_new_tokens 1024 "
         "--actor.eps_clip_low_high 0.2 0.27 --data.prompt_dataset OpenRLHF/prompts-v0.1 "
         "--algo.dynamic_filtering_enable", {
            "model.path": "models/Llama-3-8b", "cluster.num_ranks_per_node": 4,
            "algorithm.num_minibatches": 8, "actor.optimizer.lr": 5e-7, "algorithm": "grpo",
            "algorithm.kl.placement": "loss", "algorithm.kl.coefficient": 1e-3,
            "algorithm.kl.estimator": "k3", "algorithm.clip_low": 0.2, "algorithm.clip_high": 0.27,
            "data.max_prompt_tokens": 2048, "rollout.max_response_tokens": 1024,
            "data.train_files": ["data/prompts-v0.1/train.parquet"],
            "algorithm.group_filter": "mean_within"}),
        ("trl", "--num_generations 4", {"eval.num_responses_per_prompt": 4}),
        ("trl", "--num_generations_eval 2", {"eval.num_responses_per_prompt": 2}),
        ("trl", "--max_steps 100 --num_iterations 2 --save_strategy no --run_name x", {
            "trainer.num_steps": 50, "checkpoint.every_num_steps": 0, "trainer.run_dir": None,
            "eval.temperature": 1}),
        ("trl", "--vllm_importance_sampling_correction True", {
            "algorithm.rollout_correction_args.level": "sequence",
            "algorithm.rollout_correction_args.outside": "mask"}),
        ("trl", "--vllm_importance_sampling_correction False", {
            "algorithm.rollout_correction": None}),
        ("trl", "--loss_type cispo --epsilon_high 5 --top_p 0.9 --weight_decay 0.1", {
            "algorithm.clip_high": 4, "rollout.top_p": 0.9,
            "actor.optimizer.weight_decay": 0.1}),
    ],
)  # fmt: skip
def test_a_key_of_the_others_means_what_it_means_there(
    framework: str, typed: str, wanted: dict[str, Any]
) -> None:
    batch = "--rollout-batch-size 32 --n-samples-per-prompt 8" if framework == "slime" else ""
    values, _ = written(f"python train.py {batch} {typed}", framework=framework)
    assert {key: values.get(key) for key in wanted} == wanted


def test_arguments_of_a_python_script_are_their_defaults() -> None:
    text = """
parser.add_argument("--model-id", type=str, default="Qwen/Qwen3-0.6B")
parser.add_argument("--steps", default=40)
config = GRPOConfig(max_steps=args.steps, num_generations=args.unknown)
trainer = GRPOTrainer(model=args.model_id, args=config, environment_factory=Wordle)
"""
    values, recipe = written(text, ".py", framework="trl")
    assert values["trainer.num_steps"] == 40
    assert values["model.path"] == "models/Qwen3-0.6B"
    left = recipe.partition("# Without a counterpart:")[2]
    assert "num_generations=$(args.unknown)" in left
    assert "environment_factory=Wordle: set agent=environment" in left


@pytest.mark.parametrize(
    ("text", "reason"),
    [("echo hello", "name it with --from"), ("python -m verl.trainer.main_ppo 'a", "No closing")],
)
def test_a_script_that_cannot_be_read_is_refused_with_what_to_type(
    text: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("it.sh").write_text(text)
    assert main(["it.sh", "--output", "recipe.yaml"]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("recipe.yaml").exists()


VALUES = ("", "0", "-3", "abc", "1e400", "[1", "'", "{a: b", "nan", "\0")
# A quarter of the values for each key, another one for the next key; the others nightly.
QUARTERS = [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3))]


@pytest.mark.parametrize("quarter", QUARTERS)
@pytest.mark.parametrize("framework", frameworks())
def test_no_value_of_any_key_ends_in_a_traceback(framework: str, quarter: int) -> None:
    for number, name in enumerate(frameworks()[framework]["names"]):
        for value in VALUES[(number + quarter) % len(QUARTERS) :: len(QUARTERS)]:
            text = port(framework, [Typed(name, value)]).text("title")
            yaml.load(text, Loader=yaml.CSafeLoader)
    port(framework, [Typed("sglang_" + "x" * 300, "5")])


def test_a_recipe_is_written_where_the_next_command_finds_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["verl_ppo.sh"]) == 0
    assert "recipes=verl_ppo mode=check" in capsys.readouterr().out
    assert compose(["recipes=verl_ppo"])["algorithm"]["advantage"] == "gae"  # type: ignore[index]
    assert main(["verl_ppo.sh", "--output", "recipes/ours/ppo.yaml"]) == 0
    assert "next: python -m hybridrl.main recipes=ours/ppo " in capsys.readouterr().out
    assert compose(["recipes=ours/ppo"])["algorithm"]["advantage"] == "gae"  # type: ignore[index]
    assert main(["verl_ppo.sh", "--output", "there.yaml"]) == 0
    assert "mv there.yaml recipes/ && python -m hybridrl.main recipes=there " in (
        capsys.readouterr().out
    )


def test_a_recipe_is_never_overwritten(capsys: pytest.CaptureFixture[str]) -> None:
    ported("verl_ppo.sh")
    before = Path("recipe.yaml").read_text()
    assert main(["verl_gsm8k.sh", "--output", "recipe.yaml"]) == 2
    assert "recipe.yaml exists; name another file with --output" in capsys.readouterr().err
    assert Path("recipe.yaml").read_text() == before


def test_a_command_is_never_run(tmp_path: Path) -> None:
    script = "python -m verl.trainer.main_ppo data.train_files=$(touch made) trainer.nnodes=1"
    typed = read_script(script, suffix=".sh")
    assert Typed("trainer.nnodes", "1") in typed
    port("verl", typed)
    assert not Path("made").exists()


@pytest.mark.parametrize("framework", frameworks())
def test_each_line_of_the_table_writes_keys_that_exist(framework: str) -> None:
    known = {*known_keys(), "algorithm", "rollout", "actor", "data", "model", "cluster", "lora"}
    open_sections = tuple(f"{key}." for key in free_keys())
    table = frameworks()[framework]
    texts = {**table["names"], **table["defaults"], **table.get("below", {})}
    given = [(k, t) for k, v in texts.items() for t in (v.values() if isinstance(v, dict) else [v])]
    for key, text in given:
        if text.startswith("rule "):
            assert text.split()[1] in RULES, key
        elif text.split(" ")[0] not in ("out", "none"):
            written = [each.removeprefix("+").partition("=")[0] for each in text.split()]
            unknown = [name for name in written if name not in known]
            assert [name for name in unknown if not name.startswith(open_sections)] == [], key
    for former in table.get("renamed", {}).values():
        assert former in texts or answer_key(former, "1"), former
