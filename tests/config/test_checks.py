import ast
import asyncio
import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hybridrl.config.checks import messages
from hybridrl.config.checks.rollout import check_sglang_is_installed
from hybridrl.config.checks.unread import unread_keys
from hybridrl.config.checks.violations import rules_of
from hybridrl.config.load import load_config
from hybridrl.config.megatron import MegatronConfig
from hybridrl.config.reward import BATCH_COLUMNS, ROW_COLUMNS
from hybridrl.errors import ConfigError, ConfigErrors, instruction
from hybridrl.rewards import child
from tests.config.values import config_of, values_of, with_overrides
from tests.planning.models import QWEN3_5_9B

FILES = ("data.task=null", "eval.every_num_steps=0")
LORA = ("lora=default",)
MEGATRON = ("actor=megatron",)
FOUR = (*MEGATRON, "cluster.num_ranks_per_node=4")
GPUS = ("cluster=one_gpu", "cluster.num_ranks_per_node=8")
MOE = (
    *(*MEGATRON, "rollout=sglang", "rollout.dtype=bfloat16"),
    *("model.starter=null", "model.path=moe"),
)
PP2 = ("megatron.pipeline_parallel_size=2",)
TP2 = ("megatron.tensor_parallel_size=2",)
SEEING = ("model=starter_that_sees", "data=read_numbers")
NARROW = ("model.starter=null", "model.path=narrow")
WIDE = (*FOUR, "model.starter.hidden_size=256")
SGLANG = ("rollout=sglang",)
CORRECTED = ("algorithm.rollout_correction=importance",)
SERVED = (*SGLANG, "cluster=one_gpu", "rollout.dtype=bfloat16", "rollout.sleep=true")
ADAPTER = (
    *("lora=default", "lora.init_from=adapter", "lora.rank=2", "lora.alpha=2"),
    *("lora.target_modules=[o_proj,q_proj]", "model.starter.num_layers=1"),
)
MIXTRAL = (
    *MEGATRON,
    "rollout=sglang",
    "rollout.dtype=bfloat16",
    "model.starter=null",
    "model.path=mixtral",
)
SHARED = ("rollout=sglang", "rollout.dtype=bfloat16", "model.path=shared", "model.starter=null")
_FOLDER = ("model.starter=null", "data.use_chat_template=false")
_GEMMA = (*_FOLDER, "model.path=gemma")

DISTILLED = (
    *("algorithm.advantage=distillation", "algorithm.divergence_coefficient=0"),
    *("algorithm.old_logprobs=recompute", "algorithm.teacher_path=policy"),
)
SELF = ("algorithm=gkd", "algorithm.teacher_path=initial")
PLAYED = ("agent=environment", "data=calculator", "reward.function=agent")
SCORER = ("reward.function=model",)
MASKS = ("rollout.sampling_masks=true",)
MIX = (*FILES, "data.sources={a: {files: [train.jsonl]}}")
BY_SOURCE = ("algorithm.by_source={a: {advantage: rloo}}",)
SERVERS = ("serving=own",)
ELSEWHERE = ("serving.models={p: {urls: ['http://a:1']}}", "serving.num_devices_per_node=0")
COLOCATED = (*SERVERS, "serving.colocated=true", "rollout.sleep=true")
AHEAD = (*SERVERS, "trainer.max_staleness=2", "algorithm.rollout_correction=importance")
OPEN = ("rollout.oversample=1.5", "algorithm.rollout_correction=importance")
JUDGED = (
    "serving.models={p: {groups: {m: {num_devices: 1}}}, "
    "judge: {path: model, groups: {m: {num_devices: 1}}}}"
)
EYES = (*SEEING, *SGLANG, "serving.num_devices_per_node=3")
ASKING = ("reward.function=judge", "reward.args={model: judge, template: '{response}'}")


def _elsewhere(
    keys: str, of_policy: str = "groups: {m: {num_devices: 1}}", path: str = "judge"
) -> tuple[str, ...]:
    """A judge on servers that run already, and these keys of it."""
    models = f"{{p: {{{of_policy}}}, judge: {{path: {path}, {keys}}}}}"
    return (f"serving.models={models}", *ASKING)


TAUGHT = (
    "serving.models={p: {groups: {m: {num_devices: 1}}}, "
    "t: {path: taught, groups: {m: {num_devices: 1}}}}",
    *("serving.num_devices_per_node=2", "algorithm=gkd", "algorithm.teacher_path=serving.models.t"),
)


def _groups(**groups: str) -> str:
    """The override that gives the policy these groups, as NAME=KEYS."""
    text = ", ".join(f"{name}: {{{keys}}}" for name, keys in groups.items())
    return f"serving.models={{policy: {{groups: {{{text}}}}}}}"


def _with_eyes(keys: str = "num_devices: 2", **others: str) -> str:
    groups = others or {"main": "num_devices: 1"}
    return _groups(eyes=f"{keys}, worker_type: encoder", **groups)


_SHARED = (*COLOCATED, "serving.num_devices_per_node=1", _groups(main="num_devices: 1"))
_HALVES = (
    *("serving.num_devices_per_node=2", "cluster.device=cpu"),
    _groups(
        a="num_devices: 1, worker_type: prefill",
        b="num_devices: 1, worker_type: decode",
    ),
)


def _scorer(model_type: str, num_labels: int = 1, kind: str = "Sequence") -> str:
    labels = {str(n): f"LABEL_{n}" for n in range(num_labels)}
    names = [f"SomeFor{kind}Classification"]
    return json.dumps({"model_type": model_type, "architectures": names, "id2label": labels})


# What the user typed, the key that is named, and a word of the rule.
BROKEN: list[tuple[tuple[str, ...], str, str]] = [
    (("trainer.max_staleness=1",), "trainer.max_staleness", "the ranks of the policy have"),
    (
        (*AHEAD, "algorithm.rollout_correction=null"),
        "algorithm.rollout_correction",
        "trainer.max_staleness=2 learns from tokens of earlier weights",
    ),
    ((*AHEAD, "rollout.dump=true"), "trainer.max_staleness", "all prompts of a call in one file"),
    (
        (*AHEAD, *PLAYED, "serving.on_update=abort"),
        "serving.on_update",
        "agent.loop=environment holds conversations",
    ),
    (
        (*SERVERS, "cluster.num_nodes=3", "cluster.ray_address=auto"),
        "serving.num_devices_per_node",
        "have 6 devices for servers, and the groups of serving.models ask for 2",
    ),
    (
        (_groups(a="num_devices: 3, devices_per_engine: 2"), "serving.num_devices_per_node=3"),
        "serving.models.policy.groups.a.devices_per_engine",
        "must divide the 3 devices of the group",
    ),
    (
        (
            *(*SGLANG, "cluster.num_nodes=2", "cluster.ray_address=auto"),
            _groups(a="num_devices: 2", b="num_devices: 4, devices_per_engine: 2"),
            "serving.num_devices_per_node=3",
        ),
        "serving.models.policy.groups.b.devices_per_engine",
        "from device 2 on, an engine would lie on two nodes of 3 devices",
    ),
    (
        (*SERVERS, "serving.models.policy.path=model"),
        "serving.models.policy.path",
        "no model is the policy",
    ),
    (
        ("serving.models={a: {groups: {m: {num_devices: 1}}}, b: {groups: {}}}",),
        "serving.models.b.path",
        "the policy is served as a already",
    ),
    (
        (_groups(a="num_devices: 1, worker_type: placeholder"),),
        "serving.models.policy.groups",
        "the model has no engine",
    ),
    (
        (_groups(a="num_devices: 1, worker_type: prefill"),),
        "serving.models.policy.groups.a.worker_type",
        "needs a group of type decode",
    ),
    (
        (
            _groups(
                a="num_devices: 1, worker_type: prefill",
                b="num_devices: 1, worker_type: decode",
            ),
            "serving.num_devices_per_node=2",
        ),
        "serving.models.policy.groups.b.worker_type",
        "rollout.engine=hf has no halves",
    ),
    *(
        ((*EYES, *overrides), "serving.models.policy.groups.eyes.worker_type", rule)
        for overrides, rule in [
            ((_with_eyes(), "model=starter", "data=sort_digits"), "this model sees no images"),
            ((_with_eyes(), "rollout=hf"), "rollout.engine=hf has no halves, and no encoders"),
            ((_with_eyes("num_devices: 2, devices_per_engine: 2"),), "it takes weights on one"),
            ((_with_eyes(), "serving.weights=broadcast"), "it joins no process group"),
            (
                (
                    _with_eyes("num_devices: 1", main="num_devices: 2"),
                    *("serving.colocated=true", "rollout.sleep=true"),
                ),
                "SGLang's encoder gives no memory back",
            ),
            (
                (
                    _with_eyes(
                        keys="num_devices: 1",
                        a="num_devices: 1, worker_type: prefill",
                        b="num_devices: 1, worker_type: decode",
                    ),
                ),
                "its embeddings reach no prefill and decode engines",
            ),
        ]
    ),
    (
        (*SEEING, *SGLANG, _groups(eyes="num_devices: 1, worker_type: encoder")),
        "serving.models.policy.groups",
        "the model has no engine",
    ),
    (
        (*SERVERS, "serving.colocated=true", "cluster.num_ranks_per_node=2"),
        "serving.colocated",
        "groups policy.main and the trainer want the same devices",
    ),
    (
        (*COLOCATED, "cluster.num_ranks_per_node=4"),
        "serving.num_devices_per_node",
        "all 4 devices of the trainer on a node are devices of the servers, too",
    ),
    (
        (*COLOCATED,),
        "serving.models.policy.groups.main.num_devices",
        "1 of these devices are the trainer's and the others are not",
    ),
    (
        (
            *(*SGLANG, *COLOCATED, "cluster.num_nodes=2", "serving.num_devices_per_node=1"),
            "cluster.ray_address=auto",
            _groups(main="num_devices: 2, devices_per_engine: 2"),
        ),
        "serving.models.policy.groups.main.devices_per_engine",
        "ranks that share an engine lie on one node, which has 1",
    ),
    (
        (
            *(*SGLANG, *COLOCATED, "serving.num_devices_per_node=3"),
            _groups(
                a="num_devices: 1, worker_type: prefill",
                b="num_devices: 2, worker_type: decode",
            ),
        ),
        "serving.colocated",
        "halves of a request stand all on devices of the trainer, or all on their own",
    ),
    (
        (
            *(*COLOCATED, "algorithm=ppo", *ASKING),
            "serving.models={judge: {path: judge, groups: {m: {num_devices: 1}}}, "
            "p: {groups: {m: {num_devices: 1}}}}",
        ),
        "critic.num_ranks_per_node",
        "group m of judge answers until the trainer computes",
    ),
    ((*SERVERS, "serving.router=sglang"), "serving.router", "it passes requests to SGLang alone"),
    (
        (*SERVERS, *SGLANG, *MASKS, "rollout.top_k=8", "serving.router=sglang"),
        "serving.router",
        "it drops sampling masks",
    ),
    (
        (*SERVERS, *SGLANG, "model=starter_that_sees", "serving.router=sglang"),
        "serving.router",
        "it drops the ids of prompts with images",
    ),
    (
        (*SERVERS, *SGLANG, *ELSEWHERE, "model=starter_that_sees", "model.freeze_vision=false"),
        "model.freeze_vision",
        "may keep what an older tower made of an image",
    ),
    (
        (*SGLANG, *COLOCATED, "cluster.num_ranks_per_node=2", "serving.router=sglang"),
        "serving.router",
        "engines of ranks are asked through their ranks",
    ),
    (
        (*COLOCATED, "cluster.num_ranks_per_node=2", "serving.faults={it: {kind: stop}}"),
        "serving.faults.it.kind",
        "the manager ends and cuts no engines of ranks",
    ),
    (
        (*SGLANG, _groups(a="num_devices: 1, engine_args: {tp_size: 2}")),
        "serving.models.policy.groups.a.engine_args.tp_size",
        "rollout.tensor_parallel_size sets it",
    ),
    (
        (_groups(a="num_devices: 2, devices_per_engine: 2"), "serving.num_devices_per_node=2"),
        "serving.models.policy.groups.a.devices_per_engine",
        "rollout.engine=hf computes on one device",
    ),
    (
        (
            "serving.models={p: {groups: {m: {num_devices: 1}}}, "
            "judge: {path: model, groups: {m: {num_devices: 1}}}}",
            "serving.num_devices_per_node=2",
        ),
        "serving.models.judge.path",
        "it has no tokenizer",
    ),
    (
        (JUDGED, "serving.num_devices_per_node=2"),
        "serving.models.judge",
        "no reward asks this model",
    ),
    ((*SERVERS, *ASKING), "reward.args.model", "no frozen model is served"),
    (
        (JUDGED, "serving.num_devices_per_node=2", *ASKING, "reward.args.model=juge"),
        "reward.args.model",
        "serving.models has no frozen model of this name: judge",
    ),
    (
        (JUDGED, "serving.num_devices_per_node=2", *ASKING, "reward.args.template=good?"),
        "reward.args.template",
        "the judge would not see the response",
    ),
    (
        (JUDGED, "serving.num_devices_per_node=2", *ASKING, "reward.args.pattern='('"),
        "reward.args.pattern",
        "not a regular expression",
    ),
    *(
        (_elsewhere(f"urls: ['{url}']"), "serving.models.judge.urls", rule)
        for url, rule in (
            ("judge:30000", "must be http://HOST:PORT"),
            ("http://judge:port", "not a URL"),
            ("http://judge:30000/v1", "must end with the port"),
            ("http://me:secret@judge:30000", "no user or password"),
        )
    ),
    (
        _elsewhere("urls: ['http://a:1']", path="weightless"),
        "serving.models.judge.path",
        "has no vocab_size",
    ),
    (
        _elsewhere("urls: ['http://a:1', 'http://b:2', 'http://a:1']"),
        "serving.models.judge.urls",
        "http://a:1 stands there twice",
    ),
    (
        _elsewhere("urls: ['http://a:1'], groups: {m: {num_devices: 1}}"),
        "serving.models.judge.groups",
        "would be ignored: servers that run already",
    ),
    (
        _elsewhere("urls: ['http://a:1']", "urls: ['http://b:1'], groups: {m: {num_devices: 1}}"),
        "serving.models.p.groups",
        "would be ignored: servers that run already",
    ),
    (
        (*SGLANG, *ELSEWHERE, "serving.weights=broadcast", "serving.weight_deltas=true"),
        "serving.weight_deltas",
        "servers that run elsewhere take changes as files",
    ),
    (
        ("serving.models={p: {urls: ['http://a:1']}}", "serving.num_devices_per_node=0"),
        "rollout.engine",
        "servers of SGLang answer for the policy (serving.models.p.urls)",
    ),
    (
        (*SGLANG, "serving.models={p: {urls: ['http://a:1']}}"),
        "serving.num_devices_per_node",
        "the groups of serving.models ask for 0 together",
    ),
    (
        (*SGLANG, *ELSEWHERE, "serving.colocated=true", "rollout.sleep=true"),
        "serving.colocated",
        "servers that run elsewhere answer for the policy",
    ),
    (
        (*SGLANG, *ELSEWHERE, "serving.faults={it: {kind: stop}}"),
        "serving.faults.it.kind",
        "no signal to servers that others started",
    ),
    *(
        ((*SGLANG, *places, *LORA), "lora.sync", "these servers get full weights")
        for places in (ELSEWHERE, _SHARED, _HALVES)
    ),
    (
        (*SGLANG, *SERVERS, *LORA, "serving.weights=broadcast"),
        "serving.weights",
        "engines read the weights below an adapter",
    ),
    (
        _elsewhere("urls: ['http://a:1'], key_variable: NO_SUCH_KEY"),
        "serving.models.judge.key_variable",
        "the environment variable is not set",
    ),
    (
        _elsewhere("urls: ['http://a:1'], key_variable: sk-8rZq2w"),
        "serving.models.judge.key_variable",
        "must be the name of an environment variable",
    ),
    (("agent.loop=no_one", "data=calculator"), "agent.loop", "is not built in"),
    ((*PLAYED, "agent.environment=null"), "agent.environment", "plays an environment"),
    ((*PLAYED, "agent.environment=Chess"), "agent.environment", "is not built in"),
    ((*PLAYED, "agent.environment=openenv:host:80"), "agent.environment", "has an address, as in"),
    ((*PLAYED, "agent=tool_calls"), "reward.function", "agent.loop=tool_calls gives no rewards"),
    (
        ("algorithm=rae",),
        "reward.function",
        "algorithm.advantage=role_baseline reads what the agent gave each player",
    ),
    ((*PLAYED, "reward.function=exact_match"), "reward.function", "Calculator would be ignored"),
    (
        (*PLAYED, "reward.function=null", "reward.functions.x={function: exact_match}"),
        "reward.function",
        "Calculator would be ignored",
    ),
    (
        ("agent=tool_calls", "data=calculator", "agent.tools=[calculator,search]"),
        "agent.search_folder",
        "needs a folder of texts",
    ),
    (
        (
            *("agent=tool_calls", "data=calculator", "agent.tools=[python]"),
            *("agent.sandbox=http://a:1/run_code", "agent.tool_timeout_s=10"),
        ),
        "agent.tool_timeout_s",
        "may take 20 s",
    ),
    (("agent.tools=[calculater]",), "agent.tools", "is not built in; did you mean"),
    (("agent.tools=[no.py:f]",), "agent.tools", "no.py does not exist"),
    (("agent=proxy", "data=calculator"), "agent.command", "needs a program"),
    (
        ("agent=tool_calls", "data=calculator", "agent.columns=[metadata]"),
        "agent.columns",
        "rows of data.task=calculator have no further columns",
    ),
    (
        ("agent=proxy", "data=calculator", "agent.command=[no_such_program]"),
        "agent.command",
        "there is no program 'no_such_program'",
    ),
    (
        ("agent=tool_calls", "data=calculator", 'agent.tools=["mcp:no_such_program -x"]'),
        "agent.tools",
        "there is no program 'no_such_program'",
    ),
    (("agent=tool_calls",), "data.use_chat_template", "appends messages in the form"),
    (
        ("agent=tool_calls", "data=calculator", *MASKS, "rollout.top_k=8"),
        "rollout.sampling_masks",
        "their masks are not kept",
    ),
    (
        ("algorithm=gkd", "algorithm.teacher_path=initial", *MASKS, "rollout.top_k=8"),
        "rollout.sampling_masks",
        "their divergence is not finite",
    ),
    *(
        ((*SGLANG, *MASKS, *cut), "rollout.sampling_masks", f"1 < rollout.top_k <= {most}")
        for cut, most in (
            (("rollout.top_p=0.9",), 4096),
            (("rollout.top_k=5000",), 4096),
            (("rollout.top_k=200", "rollout.engine_args={sampling_mask_max_tokens: 100}"), 100),
        )
    ),
    (
        (*MOE, "agent=tool_calls", "data=calculator", "actor.replay_routing=true"),
        "actor.replay_routing",
        "their experts are not kept",
    ),
    (
        ("data=calculator", "data.use_chat_template=false"),
        "data.use_chat_template",
        "are chat messages",
    ),
    (
        (
            "algorithm.rollout_correction=importance",
            "algorithm.rollout_correction_args.reject=token_k1",
        ),
        "algorithm.rollout_correction_args.reject",
        "'token_k1' is no rule; write it as 0.5 <= token_k1 <= 2",
    ),
    (
        ("algorithm=ppo", "algorithm.loss_aggregation=prompt_mean_token_mean"),
        "algorithm.loss_aggregation",
        "the critic's loss cannot be a mean over prompts",
    ),
    (SCORER, "reward.args.path", "model needs it and has no default"),
    ((*SCORER, "reward.args.path=nowhere"), "reward.args.path", "does not exist"),
    ((*SCORER, "reward.args.path=model"), "reward.args.path", "no scalar head"),
    ((*SCORER, "reward.args.path=labels"), "reward.args.path", "gives 2 numbers"),
    ((*SCORER, "reward.args.path=scorer"), "reward.args.path", "no tokenizer"),
    ((*SCORER, "reward.args.path=unknown"), "reward.args.path", "'mamba2' is not supported"),
    (
        (*SCORER, *MEGATRON, "reward.args.path=phi3_scorer"),
        "reward.args.path",
        "and it is phi3",
    ),
    (
        (
            "reward.function=null",
            "reward.functions={nice: {function: model, args: {path: model}}}",
        ),
        "reward.functions.nice.args.path",
        "no scalar head",
    ),
    ((*_FOLDER, "model.path=scorer"), "model.path", "names a classifier"),
    (("model.starter=null",), "model.path", "needs a model folder"),
    (("model.path=model",), "model.starter", "ignored"),
    (("model.starter=null", "model.path=nowhere"), "model.path", "does not exist"),
    (("model.starter=null", "model.path=empty"), "model.path", "no config.json"),
    *(
        (("model.starter=null", f"model.path={name}", *LORA), "model.path", word)
        for name, word in {
            "list": "holds a JSON list, must be an object",
            "unknown": "'mamba2' is not supported yet",
            "small": "pad_token_id=9 is not in the vocabulary of vocab_size=9",
            "endless": "eos_token_id=9 is not in the vocabulary of 9",
            "torn": "weight_map is None",
        }.items()
    ),
    *(
        (("model.starter=null", f"model.path={name}", *LORA, "mode=check"), "model.path", word)
        for name, word in {
            "model": "it has no tokenizer: none of tokenizer.json",
            "wordless": "it has no tokenizer",
            "weightless": "it has no model.safetensors",
            "half": "it has no model-00002-of-00002.safetensors",
            "void": "void/model.safetensors is 0 bytes long, and incomplete",
            "cut": "cut/model.safetensors is 64 bytes long, and incomplete",
            "page": "page/model.safetensors is 22 bytes long, and incomplete",
        }.items()
    ),
    (("model.starter.hidden_size=200",), "model.starter.hidden_size", "multiple of 12"),
    ((*SEEING, "model.starter.hidden_size=72"), "model.starter.hidden_size", "multiple of 16"),
    ((*SEEING, "algorithm=ppo"), "algorithm.advantage", "no critic of a model that sees"),
    ((*SEEING, "mode=reward_model"), "mode", "no reward model that sees"),
    (
        (*_FOLDER, "model.path=eyes", "algorithm=ppo"),
        "algorithm.advantage",
        "without processor_config.json and preprocessor_config.json its folder sees nothing",
    ),
    (
        (*SEEING, "agent=tool_calls", "rollout.dump=true"),
        "rollout.dump",
        "images that conversations",
    ),
    (
        (*SEEING, "lora.enabled=true", "model.freeze_vision=false"),
        "lora.sync",
        "apply adapters to the language model alone",
    ),
    (("data.use_chat_template=true",), "data.use_chat_template", "learned plain text"),
    (("model.attention=varlen",), "model.attention", "runs on CUDA in bfloat16"),
    (
        (*GPUS, "actor.fsdp2.num_replicas=6"),
        "actor.fsdp2.num_replicas",
        "train a model, 8",
    ),
    (
        ("algorithm=ppo", "critic.num_ranks_per_node=2", "actor.fsdp2.num_replicas=2"),
        "actor.fsdp2.num_replicas",
        "number of ranks that train a model, 1 and 2",
    ),
    (
        (*GPUS, "actor.fsdp2.context_parallel_size=3"),
        "actor.fsdp2.context_parallel_size",
        "must divide the number of ranks that train a model, 8",
    ),
    (
        (*GPUS, "model=hf_folder", "model.path=eyes", "actor.fsdp2.context_parallel_size=2"),
        "actor.fsdp2.context_parallel_size",
        r"layers with a state \(qwen3_5_text\)",
    ),
    (("actor.fsdp2.kernels=liger",), "actor.fsdp2.kernels", "on CUDA alone"),
    (
        (*_FOLDER, "model.path=moe", "actor.fsdp2.kernels=compiled"),
        "actor.fsdp2.kernels",
        "qwen3_moe's experts do not compile",
    ),
    ((*GPUS, "actor.fsdp2.kernels=liger"), "actor.fsdp2.kernels", "not installed"),
    (
        ("rollout.num_responses_per_prompt=1",),
        "rollout.num_responses_per_prompt",
        "responses to the same prompt",
    ),
    (("algorithm=ppo", "trainer.num_steps=5"), "critic.num_warmup_steps", "never learn"),
    (
        ("trainer.profile_steps=[2,9]", "trainer.num_steps=5"),
        "trainer.profile_steps",
        "has step 9, and the run ends after trainer.num_steps=5",
    ),
    (("actor.optimizer.num_warmup_steps=100",), "actor.optimizer.num_warmup_steps", "never rise"),
    (
        ("mode=sft", "trainer.num_steps=5", "actor.optimizer.num_warmup_steps=5"),
        "actor.optimizer.num_warmup_steps",
        "takes 5 optimizer steps",
    ),
    (("algorithm=ppo", "critic.num_minibatches=3"), "critic.num_minibatches", "multiple of 3"),
    (
        ("algorithm=ppo", "critic.num_ranks_per_node=3"),
        "critic.num_ranks_per_node",
        "multiple of 12 (3 ranks",
    ),
    (("algorithm.num_epochs=2",), "algorithm.old_logprobs", "one update"),
    (("algorithm.num_minibatches=4",), "algorithm.old_logprobs", "num_minibatches=4"),
    (
        ("algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.1"),
        "algorithm.old_logprobs",
        "before the update",
    ),
    (("algorithm.kl.placement=loss",), "algorithm.kl.coefficient", "has no effect"),
    (
        (
            "algorithm.kl.placement=loss",
            "algorithm.kl.coefficient=0.1",
            "algorithm.kl.estimator=k1",
        ),
        "algorithm.kl.estimator",
        "expected gradient is 0",
    ),
    (("algorithm.advantage=grpoo",), "algorithm.advantage", "neither a built-in advantage"),
    (
        (*CORRECTED, "algorithm.rollout_correction_args={reject: token_k4 <= 1}"),
        "algorithm.rollout_correction_args.reject",
        "'token_k4' is no statistic",
    ),
    (
        (*CORRECTED, "algorithm.rollout_correction_args={normalize: true}"),
        "algorithm.rollout_correction_args.normalize",
        "before the update",
    ),
    (
        ("algorithm.advantage='own.py:distance'", "algorithm.old_logprobs=recompute"),
        "algorithm.kl.placement",
        "reads log-probs of a reference",
    ),
    (
        (
            *(*MIX, "algorithm.by_source={a: {advantage: 'own.py:distance'}}"),
            "algorithm.old_logprobs=recompute",
        ),
        "algorithm.kl.placement",
        "that of a source, reads log-probs of a reference",
    ),
    (
        ("algorithm.soft_overlong_tokens=90",),
        "algorithm.soft_overlong_tokens",
        "at most rollout.max_response_tokens",
    ),
    (
        ("algorithm=ppo", "algorithm.group_filter=zero_variance"),
        "algorithm.group_filter",
        "compares responses with a critic",
    ),
    (
        (*SGLANG, "rollout.engine_args={port: 1, chunked_prefill_size: 512}"),
        "rollout.engine_args.port",
        "looks for a free one",
    ),
    (
        (*SGLANG, "rollout.engine_args={max_lora_rank: 64, lora_backend: triton}"),
        "rollout.engine_args.max_lora_rank",
        "lora.rank sets it",
    ),
    ((*SERVED, "rollout.dtype=float32"), "rollout.dtype", "compute in bfloat16"),
    ((*SGLANG, "rollout.stage_timeout_s=50"), "rollout.stage_timeout_s", "30 s more"),
    ((*SGLANG, "rollout.stage_timeout_s=20"), "rollout.stage_timeout_s", "30 s more"),
    (
        (*SGLANG, "model.starter=null", "model.path=tied_moe"),
        "model.path",
        "does not tie that of qwen3_moe",
    ),
    (
        (*SGLANG, "model.starter=null", "model.path=dense_moe"),
        "model.path",
        "gives all layers of qwen2_moe random ones",
    ),
    (
        ("rollout.oversample=2",),
        "algorithm.rollout_correction",
        "rollout.oversample=2 learns from tokens of earlier weights",
    ),
    (
        (*OPEN, "cluster.num_ranks_per_node=4", "rollout.oversample=1.3"),
        "rollout.oversample",
        "21 open prompts (of trainer.num_prompts_per_step=16) must be a multiple of 4",
    ),
    ((*OPEN, "rollout.oversample=1.00000001"), "rollout.oversample", "more than a step has"),
    (
        (*OPEN, "agent=tool_calls", "data=calculator"),
        "rollout.oversample",
        "conversations are not interrupted",
    ),
    ((*OPEN, *SERVERS), "rollout.oversample", "set trainer.max_staleness instead"),
    ((*OPEN, "rollout.dump=true"), "rollout.oversample", "all prompts of a call in one file"),
    (
        (*MOE, *SGLANG, *OPEN, "actor.replay_routing=true"),
        "rollout.oversample",
        "experts of interrupted tokens",
    ),
    (("rollout.replay=empty",), "rollout.replay", "rollout.dump=true"),
    (
        ("trainer.max_staleness=1", "rollout.replay=old"),
        "trainer.max_staleness",
        "rollout.replay samples nothing",
    ),
    (
        _elsewhere("urls: ['http://a:1'], max_context_tokens: 1000000"),
        "serving.models.judge.max_context_tokens",
        "the context of the model is 32768 tokens",
    ),
    (
        (*MEGATRON, *GPUS, "megatron.layers=local", "megatron.transformer_args={fp8: hybrid}"),
        "megatron.transformer_args.fp8",
        "it has other layers than megatron.layers=local",
    ),
    (
        ("algorithm=distillation",),
        "algorithm.teacher_path",
        "reads the log-probs of a teacher",
    ),
    (("algorithm=gkd",), "algorithm.teacher_path", "and there is no teacher"),
    (
        ("algorithm=gkd", "algorithm.teacher_paths={a: scorer}"),
        "algorithm.teacher_paths.a",
        "has no log-probs",
    ),
    (
        ("algorithm=gkd", "algorithm.teacher_path=policy"),
        "algorithm.teacher_path",
        "there is nothing to learn",
    ),
    *(
        ((*TAUGHT, *changed), key, rule)
        for changed, key, rule in (
            (("algorithm.teacher_path=serving.models.u",), "algorithm.teacher_path", "name: t"),
            (
                ("algorithm.teacher_paths={a: model}",),
                "algorithm.teacher_paths.a",
                "t is served, and with it all teachers are",
            ),
            (
                ("reward.function=judge", "reward.args={model: t, template: '{response}'}"),
                "algorithm.teacher_path",
                "a judge of this name is asked after sampling",
            ),
            (SEEING, "algorithm.teacher_path", "a served teacher reads no images"),
            (
                ("serving.models.t.max_context_tokens=9",),
                "algorithm.teacher_path",
                "must have room for a row of",
            ),
            (
                (*_FOLDER, "model.path=model"),
                "algorithm.teacher_path",
                "their log-probs cannot be compared",
            ),
            (
                ("algorithm.divergence_top_k=null",),
                "algorithm.divergence_top_k",
                "a served teacher names its likeliest tokens",
            ),
            (
                (*SGLANG, "rollout.temperature=0.5"),
                "rollout.temperature",
                "SGLang scores for a served teacher at 1 alone",
            ),
            (
                ("algorithm=distillation", TAUGHT[-1], "rollout.top_p=0.9", *MASKS),
                "rollout.sampling_masks",
                "a served teacher scores among all tokens",
            ),
            (
                (
                    *(*SGLANG, "serving.num_devices_per_node=3"),
                    "serving.models.t.groups={m: {num_devices: 1, worker_type: prefill}, "
                    "n: {num_devices: 1, worker_type: decode}}",
                ),
                "algorithm.teacher_path",
                "a decode engine knows no log-probs of a context",
            ),
        )
    ),
    *(
        ((*SELF, *with_what, f"algorithm.teacher_prompt='{text}'"), "algorithm.teacher_prompt", why)
        for with_what, text, why in (
            ((), "{prompt.upper}", "plain names stand in its braces: 'prompt.upper' is none"),
            ((), "{prompt", "plain names stand in its braces: expected '}'"),
            ((), "{prompt} {hint}", "names hint, and rows of data.task=sort_digits"),
            (SEEING, "{answer}", "a model that sees"),
            (
                (*MOE, *SGLANG, "actor.replay_routing=true", *DISTILLED),
                "{answer}",
                "through the experts of its own prompt",
            ),
            (
                ("agent=tool_calls", "data=calculator", "agent.history=branch"),
                "{answer}",
                "gives a row several prompts",
            ),
        )
    ),
    (
        (*MEGATRON, *SELF, "cluster.num_ranks_per_node=2", *TP2, "algorithm.divergence_top_k=null"),
        "algorithm.divergence_top_k",
        "none compares all of it",
    ),
    (
        (*GPUS, *_GEMMA, "actor.fsdp2.kernels=liger"),
        "actor.fsdp2.kernels",
        "and this is gemma3_text",
    ),
    (
        (
            "algorithm.advantage='own.py:distance'",
            *("algorithm.kl.placement=loss", "algorithm.kl.coefficient=0.1"),
        ),
        "algorithm.old_logprobs",
        "own.py:distance needs log-probs before the update",
    ),
    (
        (
            *(*_FOLDER, "model.path=model", "algorithm=distillation"),
            *("algorithm.teacher_path=model", "algorithm.old_logprobs=recompute"),
            *("algorithm.kl.placement=reward", "algorithm.kl.coefficient=0.1"),
        ),
        "algorithm.kl.placement",
        "reads no reward",
    ),
    (("mode=reward_model", *LORA), "lora.enabled", "mode=reward_model trains all weights"),
    (
        ("rollout.replay=old", "trainer.run_dir=old", "trainer.overwrite=true"),
        "trainer.overwrite",
        "would delete the rollouts",
    ),
    (
        (
            "rollout=sglang",
            "rollout.tensor_parallel_size=4",
            "cluster.num_nodes=2",
            "cluster.ray_address=auto",
            "cluster.num_ranks_per_node=2",
        ),
        "rollout.tensor_parallel_size",
        "must divide cluster.num_ranks_per_node=2",
    ),
    (
        ("trainer.num_prompts_per_step=15", "cluster.num_ranks_per_node=2"),
        "trainer.num_prompts_per_step",
        "multiple of 2 rollout engines",
    ),
    (
        (
            "algorithm.old_logprobs=recompute",
            "algorithm.num_minibatches=3",
            "cluster.num_ranks_per_node=8",
        ),
        "trainer.num_prompts_per_step",
        "multiple of 24",
    ),
    (("data.task=null",), "data.train_files", "a built-in task"),
    (("data.task=null", "data.train_files=[train.jsonl]"), "eval.every_num_steps", "empty"),
    (
        (*FILES, "data.train_files=[train.jsonl]", "data.prompt_key=null"),
        "data.prompt_key",
        "only the chats of preference pairs",
    ),
    (
        (*FILES, "data.train_files=[train.jsonl]", "data.rejected_key=r", "data.answer_key=null"),
        "data.answer_key",
        "a column of its own",
    ),
    (
        (*FILES, "data.train_files=[train.jsonl]", "mode=dpo"),
        "data.rejected_key",
        "mode=dpo learns from pairs",
    ),
    (("mode=dpo", "dpo.loss=sigmod"), "dpo.loss", "neither a built-in preference loss nor"),
    (("mode=dpo", "dpo.loss_args.tau=1"), "dpo.loss_args.tau", "sigmoid has no such number"),
    (
        (*FILES, "data.train_files=[train.jsonl,train.jsonl]"),
        "data.train_files",
        "lists a file twice",
    ),
    (
        ("tracking.trackers=[prometheus]", "tracking.prometheus_address=localhost"),
        "tracking.prometheus_address",
        "must be HOST:PORT",
    ),
    (("checkpoint.function=copy",), "checkpoint.function", "neither a built-in function of check"),
    (("tracking.function=keep",), "tracking.function", "neither a built-in function of metrics"),
    (("eval.temperature=0.0001",), "eval.temperature", "0 (greedy decoding) or at least 0.001"),
    (
        ("eval.sets={hot: {temperature: 0.0001}}",),
        "eval.sets.hot.temperature",
        "0 (greedy decoding) or at least 0.001",
    ),
    (
        ("eval.temperature=1.0", "eval.pass_at_k=[1, 8]"),
        "eval.pass_at_k",
        "k=8 is above eval.num_responses_per_prompt=1",
    ),
    (
        ("eval.sets={math: {num_responses_per_prompt: 4, pass_at_k: [3]}}",),
        "eval.sets.math.pass_at_k",
        "gives k equal responses",
    ),
    (("eval.sets={reward: {num_prompts: 5}}",), "eval.sets.reward", "metrics have this word"),
    (
        ("data.task=null", "data.train_files=[train.jsonl]", "eval.sets={a: {files: null}}"),
        "eval.every_num_steps",
        "(and eval.sets.a.files)",
    ),
    (("eval.sets={a: {files: [no.jsonl]}}",), "eval.sets.a.files", "does not exist"),
    (("mode=eval", "data.task=null"), "data.eval_files", "nothing to evaluate on"),
    (("checkpoint.best_metric=eval/pass_at_8",), "checkpoint.best_metric", "does not measure it"),
    (
        ("checkpoint.best_metric=eval/reward/mean", "eval.every_num_steps=0"),
        "checkpoint.best_metric",
        "does not measure it",
    ),
    (("mode=eval", "eval.checkpoint=nowhere"), "eval.checkpoint", "it is no run folder"),
    (
        ("mode=eval", "eval.checkpoint=old/checkpoints/step-000000004", *LORA),
        "lora.enabled",
        "is merged into its weights",
    ),
    (
        (
            *FILES,
            "data.sources={a: {files: [train.jsonl]}, b: {files: [train.jsonl], weight: 10000}}",
        ),
        "data.sources.a.weight",
        "less than a thousandth",
    ),
    (("data.curriculum=easy_first",), "data.curriculum", "data.difficulty_key, which is null"),
    *(
        ((*typed, *BY_SOURCE), "algorithm.by_source.a.advantage", rule)
        for typed, rule in (
            ((), "data.sources has none, and not a"),
            ((*MIX, "algorithm=ppo"), "a critic learns from the rows of all sources"),
        )
    ),
    (
        (*MIX, "algorithm.by_source={a: {advantage: rloo, advantage_args: {lam: 1}}}"),
        "algorithm.by_source.a.advantage_args.lam",
        "rloo has",
    ),
    (
        (*MIX, "algorithm.by_source={a: {advantage: rlo}}"),
        "algorithm.by_source.a.advantage",
        "neither a built-in advantage",
    ),
    (
        (*MIX, "algorithm.by_source={a: {advantage: distillation}}"),
        "algorithm.teacher_path",
        "that of a source, reads the log-probs of a teacher",
    ),
    (("data.curriculum=solve_rate", "mode=sft"), "data.curriculum", "mode=sft solves nothing"),
    (("data.curriculum=solve_rate", *AHEAD), "data.curriculum", "before earlier ones are solved"),
    (("data.curriculum=solve_rate", *OPEN), "data.curriculum", "before earlier ones are solved"),
    (("cluster.num_nodes=2",), "cluster.num_nodes", "this machine alone"),
    (
        ("cluster.worker_setup_hook=install",),
        "cluster.worker_setup_hook",
        "package.module.function",
    ),
    (("cluster.worker_setup_hook=nopkg.a.b",), "cluster.worker_setup_hook", "no module nopkg"),
    (("cluster.worker_setup_hook=json.nomod.b",), "cluster.worker_setup_hook", "module json.nomod"),
    (("cluster.ray_address=somewhere",), "cluster.ray_address", "HOST:PORT"),
    (("reward.function=exact_mach",), "reward.function", "neither"),
    (("reward.function=math",), "reward.function", "math-verify"),
    (("reward.function=nowhere.py:score",), "reward.function", "does not exist"),
    (("reward.function=reward.py:scoer",), "reward.function", "defines no 'scoer'"),
    (("reward.function=broken.py:score",), "reward.function", "not a Python file"),
    (("reward.function=outside.py:score",), "reward.function", "'return' outside function"),
    (
        ("reward.function=rewards.py:many",),
        "reward.function",
        "rows of data.task=sort_digits lack",
    ),
    (("reward.function=rewards.py:mixed",), "reward.function", "of one row, and 'answers', of all"),
    (("reward.function=rewards.py:placed",), "reward.function", "positional-only parameter 'resp"),
    (("reward.function=null",), "reward.function", "needs a function, or several"),
    (
        ("reward.functions={a: {function: exact_match}}",),
        "reward.function",
        "reward.functions gives a",
    ),
    (
        ("reward.function=null", "reward.functions={a: {function: exact_mach}}"),
        "reward.functions.a.function",
        "neither",
    ),
    (
        ("reward.function=null", "reward.functions={kl_charge: {function: exact_match}}"),
        "reward.functions.kl_charge",
        "another metric",
    ),
    (("reward.args={n: 1}",), "reward.args.n", "exact_match has no such number"),
    (("reward.function=format",), "reward.args.pattern", "format needs it"),
    (
        (
            "reward.function=null",
            "reward.functions={a: {function: length, args: {tokens: 9, mode: budgit}}}",
        ),
        "reward.functions.a.args.mode",
        "must be one of budget, target",
    ),
    (("reward.function=rewards.py:scaled", "reward.args={by: 3}"), "reward.args.by", "<= 2"),
    (("reward.function=rewards.py:Score",), "reward.function", "is a class, not a function"),
    (("reward.function=rewards.py:json",), "reward.function", "is a module, not a function"),
    (("reward.function=rewards.txt:score",), "reward.function", "must end in .py"),
    (("trainer.run_dir=model", "trainer.overwrite=true"), "trainer.run_dir", "not a run folder"),
    (("trainer.run_dir=.",), "trainer.run_dir", "not a run folder"),
    (("trainer.run_dir=train.jsonl/run",), "trainer.run_dir", "no folder"),
    ((*LORA, "lora.target_modules=[]"), "lora.target_modules", "a layer to adapt"),
    ((*LORA, "lora.target_modules=[q_porj]"), "lora.target_modules", "did you mean 'q_proj'"),
    ((*LORA, "lora.target_modules=[lm_head]"), "lora.target_modules", "matches no linear layer"),
    ((*LORA, "lora.rank=65"), "lora.rank", "at most 64: k_proj has 192 inputs and 64 outputs"),
    ((*LORA, "lora.init_from=nowhere"), "lora.init_from", "No such file"),
    ((*LORA, "lora.init_from=empty"), "lora.init_from", "empty/adapter_config.json"),
    ((*ADAPTER, "lora.rank=4"), "lora.rank", "was made with 2"),
    ((*ADAPTER, "lora.alpha=4"), "lora.alpha", "was made with 2"),
    ((*ADAPTER, "lora.use_rslora=true"), "lora.use_rslora", "was made with False"),
    ((*ADAPTER, "lora.target_modules=[q_proj]"), "lora.target_modules", "made with ['o_proj',"),
    ((*ADAPTER, "model.starter.num_layers=2"), "lora.init_from", "4 tensors, and this one 8"),
    ((*ADAPTER, "lora.init_from=dora"), "lora.init_from", "use_dora=True is not supported"),
    (
        (*SEEING, *ADAPTER, "model.freeze_vision=false", "lora.sync=merged"),
        "model.freeze_vision",
        "lora.init_from=adapter has 0 tensors of the tower",
    ),
    (
        (*SEEING, *ADAPTER, "lora.init_from=seen", "lora.sync=merged"),
        "model.freeze_vision",
        "lora.init_from=seen has 2 tensors of the tower",
    ),
    ((*MEGATRON, *TP2), "cluster.num_ranks_per_node", "multiple of 2: tensor 2 x pipeline 1"),
    (
        (*FOUR, *TP2, "algorithm=ppo", "critic.num_ranks_per_node=1"),
        "critic.num_ranks_per_node",
        "ranks over all nodes, 1, must be a multiple of 2",
    ),
    (
        (
            *(*MEGATRON, "cluster.num_ranks_per_node=3", "megatron.tensor_parallel_size=3"),
            *("trainer.num_prompts_per_step=12", *NARROW),
        ),
        "megatron.tensor_parallel_size",
        "divide the model's 2 key-value heads, or be a multiple",
    ),
    (
        (
            *(*MEGATRON, "cluster.num_ranks_per_node=6", "megatron.tensor_parallel_size=6"),
            *("trainer.num_prompts_per_step=12", *NARROW),
        ),
        "megatron.tensor_parallel_size",
        "rows of queries, keys and values together",
    ),
    (
        (*FOUR, "megatron.tensor_parallel_size=4"),
        "megatron.tensor_parallel_size",
        "divide the model's 6 query heads",
    ),
    (
        (*FOUR, *NARROW, "megatron.tensor_parallel_size=4"),
        "megatron.tensor_parallel_size",
        "510 columns inside the MLP",
    ),
    (
        (*MEGATRON, "cluster.num_ranks_per_node=3", "megatron.pipeline_parallel_size=3"),
        "megatron.pipeline_parallel_size",
        "divide the model's 4 layers, unless",
    ),
    (
        (*FOUR, *PP2, "megatron.num_layers_in_first_stage=1", "megatron.num_virtual_stages=2"),
        "megatron.num_layers_in_first_stage",
        "by 2 virtual stages",
    ),
    (
        (
            *(*FOUR, "megatron.pipeline_parallel_size=4", "model.starter.num_layers=7"),
            "megatron.num_layers_in_last_stage=3",
        ),
        "megatron.num_layers_in_last_stage",
        "the model's 7 layers must divide by the stages in between",
    ),
    (
        (*MEGATRON, "megatron.num_layers_in_last_stage=2"),
        "megatron.num_layers_in_last_stage",
        "there is one stage",
    ),
    (
        (*WIDE, *LORA, "megatron.tensor_parallel_size=4"),
        "megatron.tensor_parallel_size",
        "a full one of the model's 2 key-value heads",
    ),
    (
        (*FOUR, *PP2, "megatron.num_virtual_stages=3"),
        "megatron.num_virtual_stages",
        "divide the 2 layers of a pipeline rank",
    ),
    (
        (*FOUR, "megatron.num_virtual_stages=2"),
        "megatron.num_virtual_stages",
        "pipeline_parallel_size of at least 2",
    ),
    ((*FOUR, "megatron.sequence_parallel=true"), "megatron.sequence_parallel", "tokens are shared"),
    (
        (*FOUR, "megatron.expert_parallel_size=2"),
        "megatron.expert_parallel_size",
        "no experts to share",
    ),
    (
        (*FOUR, "megatron.expert_tensor_parallel_size=2"),
        "megatron.expert_tensor_parallel_size",
        "no experts to share",
    ),
    (
        (*MOE, *GPUS, "megatron.expert_parallel_size=3", "cluster.num_ranks_per_node=6"),
        "megatron.expert_parallel_size",
        "divide the model's 8 experts",
    ),
    (
        (*MOE, *GPUS, "megatron.expert_tensor_parallel_size=4"),
        "megatron.expert_tensor_parallel_size",
        "34 columns inside an expert",
    ),
    (
        (*MOE, *GPUS, "megatron.tensor_parallel_size=4", "megatron.sequence_parallel=true"),
        "megatron.expert_parallel_size",
        "each of 4 tensor-parallel ranks would train its own",
    ),
    (
        (*MOE, *GPUS, "megatron.expert_parallel_size=8", *PP2),
        "cluster.num_ranks_per_node",
        "multiple of 16, for experts: expert 8 x expert tensor 1 x pipeline 2",
    ),
    ((*MOE, *GPUS, *TP2), "megatron.sequence_parallel", "tokens of its own"),
    (
        (*MOE, "cluster.num_ranks_per_node=2", "megatron.expert_tensor_parallel_size=2"),
        "megatron.expert_tensor_parallel_size",
        "which gloo",
    ),
    (
        (*FOUR, "megatron.layers=transformer_engine"),
        "megatron.layers",
        "runs on CUDA alone",
    ),
    (
        (*MEGATRON, *GPUS, "megatron.layers=transformer_engine"),
        "megatron.layers",
        "TransformerEngine, and it is not installed",
    ),
    ((*MEGATRON, "model.dtype=bfloat16"), "model.dtype", "keeps trained weights in float32"),
    (
        ("algorithm=ppo", *MEGATRON, *LORA, "model.dtype=bfloat16"),
        "model.dtype",
        "keeps trained weights in float32",
    ),
    (
        (*FOUR, "megatron.attention=transformer_engine"),
        "megatron.attention",
        "runs on CUDA alone",
    ),
    (
        (*MEGATRON, *GPUS, "megatron.layers=local", "megatron.attention=transformer_engine"),
        "megatron.attention",
        "it has other layers than megatron.layers=local",
    ),
    (
        (*LORA, *_FOLDER, "model.path=moe"),
        "lora.target_modules",
        "actor.engine=fsdp2 and rollout.engine=hf cannot adapt experts",
    ),
    (
        (*MEGATRON, *LORA, *_FOLDER, "model.path=moe"),
        "lora.target_modules",
        "rollout.engine=hf cannot adapt experts",
    ),
    (
        (*MOE, *LORA, *GPUS, "megatron.expert_tensor_parallel_size=2"),
        "megatron.expert_tensor_parallel_size",
        "on one rank",
    ),
    (
        (*MEGATRON, *SGLANG, "actor.replay_routing=true"),
        "actor.replay_routing",
        "no experts to route",
    ),
    ((*MOE, "rollout=hf", "actor.replay_routing=true"), "actor.replay_routing", "does not return"),
    (
        (*MOE, "mode=sft", "actor.replay_routing=true"),
        "actor.replay_routing",
        "mode=sft learns from a file",
    ),
    (
        (*MEGATRON, "megatron.transformer_args={moe_z_loss_coeff: 0.001}"),
        "megatron.transformer_args.moe_z_loss_coeff",
        "added up over micro-batches",
    ),
    (
        (
            *MEGATRON,
            "megatron.transformer_args={sequence_parallel: true, bias_activation_fusion: true}",
        ),
        "megatron.transformer_args.sequence_parallel",
        "megatron.sequence_parallel sets it",
    ),
    (
        (*MEGATRON, "megatron.transformer_args={fp8: hybrid}"),
        "megatron.transformer_args.fp8",
        "it runs on CUDA alone",
    ),
    (
        (*MEGATRON, "megatron.transformer_args={moe_token_dispatcher_type: allgather}"),
        "megatron.transformer_args.moe_token_dispatcher_type",
        "only alltoall and flex support",
    ),
    (
        (*MEGATRON, "megatron.optimizer_args={clip_grad: 2.0}"),
        "megatron.optimizer_args.clip_grad",
        "actor.optimizer.max_grad_norm sets it",
    ),
    (
        (*MEGATRON, "megatron.optimizer_args={use_precision_aware_optimizer: true}"),
        "megatron.optimizer_args.use_precision_aware_optimizer",
        "it runs on CUDA alone",
    ),
    (
        (*MEGATRON, *GPUS, "megatron.optimizer_args={exp_avg_dtype: float16}"),
        "megatron.optimizer_args.exp_avg_dtype",
        "must be float32 or bfloat16",
    ),
    (
        (*MEGATRON, "megatron.ddp_args={nccl_ub: true}"),
        "megatron.ddp_args.nccl_ub",
        "keep the old address",
    ),
    (
        (*MEGATRON, "megatron.transformer_args={num_query_groups: 2}"),
        "megatron.transformer_args.num_query_groups",
        "config.json sets it",
    ),
    (
        (*MEGATRON, "megatron.transformer_args={attention_dropout: 0.1}"),
        "megatron.transformer_args.attention_dropout",
        "not be the one that sampled",
    ),
    (
        (*_FOLDER, "model.path=phi", "rollout=sglang"),
        "rollout.engine",
        "model.path=phi is phi3",
    ),
    ((*_GEMMA, "actor=megatron"), "actor.engine", "model.path=gemma is gemma3_text"),
    (
        (*_FOLDER, "model.path=capped"),
        "model.path",
        "softcapping=30.0 is not supported",
    ),
    ((*_FOLDER, "model.path=dynamic"), "model.path", "rope_type='dynamic' is not supported"),
    ((*_FOLDER, "model.path=phi", *LORA), "lora.target_modules", "matches no linear layer"),
    ((*MIXTRAL, "actor.replay_routing=true"), "actor.replay_routing", "no layer number"),
    ((*MIXTRAL, *LORA), "lora.target_modules", "(known: k_proj, o_proj, q_proj, v_proj)"),
    (
        (*MEGATRON, *TP2, "cluster.num_ranks_per_node=2", *SHARED),
        "megatron.tensor_parallel_size",
        "35 columns inside the shared expert",
    ),
    (
        (*_FOLDER, "model.path=model", "eval.max_response_tokens=41"),
        "eval.max_response_tokens",
        "with data.max_prompt_tokens=24 it exceeds the model's context of 64 tokens",
    ),
    (
        (*_FOLDER, "model.path=model", "eval.sets={a: {}}", "eval.max_response_tokens=70"),
        "eval.sets.a.max_response_tokens",
        "with data.max_prompt_tokens=24 it exceeds the model's context of 64 tokens",
    ),
    (
        (*_FOLDER, "model.path=model", "eval.max_response_tokens=50", "data.max_prompt_tokens=64"),
        "eval.max_response_tokens",
        "with data.max_prompt_tokens=64 it exceeds",
    ),
    (
        (*SGLANG, *_FOLDER, "model.path=mistral", "eval.max_response_tokens=4090"),
        "model.path",
        "and rollout.max_response_tokens=24 and eval.max_response_tokens=4090",
    ),
    (
        (*_FOLDER, "model.path=long", "rollout.max_response_tokens=100"),
        "model.path",
        "its context is 64 tokens",
    ),
    (
        (
            *(*FOUR, *TP2, "trainer.num_prompts_per_step=4", "rollout.num_responses_per_prompt=9"),
            *("algorithm.num_minibatches=8", "algorithm.old_logprobs=recompute"),
        ),
        "trainer.num_prompts_per_step",
        "2 data-parallel ranks, of 2 ranks each",
    ),
    (
        (*FOUR, *TP2, "mode=sft", "trainer.num_prompts_per_step=63"),
        "trainer.num_prompts_per_step",
        "multiple of 2 data-parallel ranks",
    ),
]
NO_TENSORS = "\2" + 7 * "\0" + "{}"
"""A safetensors file of none."""

TOWER = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
TOWER |= {"out_hidden_size": 4096, "num_position_embeddings": 2304}
QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 100,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 34,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
REWARDS = """# -*- coding: latin-1 -*-
import json
def few(responses): ...
def many(responses, answers, prompts, sources, n): ...
def mixed(response, answers): ...
def placed(responses, /): ...
def scaled(response, *, by: Annotated[float, Field(ge=0, le=2, description="test")] = 1): ...
async def later(**_): ...
class Score: ...
if json:
    def within(responses, *, answers, n=1, **others): ...
made = wrapped = lambda **_: []
@json.JSONEncoder
def decorated(): ...
"""
# What the user typed, the key that would be ignored, and why.
UNREAD: list[tuple[tuple[str, ...], str, str]] = [
    (MASKS, "rollout.sampling_masks", "leave all tokens"),
    (("model.freeze_vision=false",), "model.freeze_vision", "has no vision tower"),
    (("data.max_image_pixels=9999",), "data.max_image_pixels", "has no vision tower"),
    ((*MEGATRON, "actor.fsdp2.num_replicas=2"), "actor.fsdp2.num_replicas", "engine=megatron"),
    (
        (*MEGATRON, "actor.fsdp2.context_parallel_size=2"),
        "actor.fsdp2.context_parallel_size",
        "engine=megatron",
    ),
    (TP2, "megatron.tensor_parallel_size", "actor.engine=fsdp2"),
    (
        ("megatron.transformer_args={fp8: hybrid}",),
        "megatron.transformer_args",
        "actor.engine=fsdp2",
    ),
    (
        (*MEGATRON, "megatron.load_balance_coefficient=0.01"),
        "megatron.load_balance_coefficient",
        "no experts to route",
    ),
    (
        (*MEGATRON, "megatron.transformer_args={recompute_modules: [core_attn]}"),
        "megatron.transformer_args.recompute_modules",
        "actor.gradient_checkpointing=false",
    ),
    (
        (*MEGATRON, "megatron.optimizer_args={optimizer_cpu_offload: true}"),
        "megatron.optimizer_args.optimizer_cpu_offload",
        "on the host already",
    ),
    (("data.train_files=[train.jsonl]",), "data.train_files", "makes its own rows"),
    (("data.eval_files=[train.jsonl]",), "data.eval_files", "makes its own rows"),
    (
        (*FILES, "data.train_files=[train.jsonl]", "data.sources={a: {files: [train.jsonl]}}"),
        "data.train_files",
        "data.sources has the rows",
    ),
    (
        ("data.sources={a: {files: [train.jsonl]}}", "eval.every_num_steps=0"),
        "data.task",
        "data.sources has the rows",
    ),
    (
        ("mode=eval", "eval.checkpoint=old", "model.path=model", "model.starter=null"),
        "model.path",
        "that of eval.checkpoint",
    ),
    (("mode=eval", "eval.checkpoint=old", *LORA), "lora.enabled", "merged into its weights"),
    *(
        ((override,), override.partition("=")[0], "rollout.engine=hf")
        for override in (
            *("rollout.memory_fraction=0.5", "rollout.transport=disk"),
            "rollout.engine_args={chunked_prefill_size: 512}",
            *("rollout.start_timeout_s=10.0", "rollout.request_timeout_s=10.0"),
        )
    ),
    (("rollout.tensor_parallel_size=2",), "rollout.tensor_parallel_size", "one rank"),
    (
        (*SGLANG, *ELSEWHERE, "rollout.engine_args={chunked_prefill_size: 64}"),
        "rollout.engine_args",
        "the servers run already",
    ),
    (
        ("tracking.prometheus_address=127.0.0.1:0",),
        "tracking.prometheus_address",
        "prometheus is not among tracking.trackers",
    ),
    (
        ("checkpoint.every_num_steps=0", "checkpoint.function=copy.py:copy"),
        "checkpoint.function",
        "no checkpoint is written",
    ),
    (("mode=eval", "rollout.dump=true"), "rollout.dump", "this is mode=eval"),
    (("mode=eval", "rollout.replay=old"), "rollout.replay", "this is mode=eval"),
    (("mode=eval", "trainer.profile_steps=[1]"), "trainer.profile_steps", "this is mode=eval"),
    (("rollout.replay=old", "rollout.dump=true"), "rollout.dump", "a second copy"),
    ((*LORA, "lora.base=backup"), "lora.base", "rollout.sleep=false"),
    (
        (*LORA, "lora.base=resend", "lora.sync=merged", "rollout.sleep=true"),
        "lora.base",
        "lora.sync=merged",
    ),
    (
        (*SERVERS, *SGLANG, "rollout.tensor_parallel_size=2", "cluster.num_ranks_per_node=2"),
        "rollout.tensor_parallel_size",
        "devices_per_engine of a group",
    ),
    (
        (
            *(*SGLANG, *COLOCATED, "cluster.num_ranks_per_node=2"),
            *("rollout.tensor_parallel_size=2", _groups(main="num_devices: 2")),
        ),
        "rollout.tensor_parallel_size",
        "devices_per_engine of a group",
    ),
    (("serving.weights=broadcast",), "serving.weights", "the ranks have the rollout engines"),
    (("serving.router=sglang",), "serving.router", "the ranks have the rollout engines"),
    (
        ("serving.weight_deltas=true",),
        "serving.weight_deltas",
        "the ranks have the rollout engines",
    ),
    *(
        (
            (*COLOCATED, JUDGED.replace("path: model", "path: judge"), *ASKING, override),
            key,
            "the ranks have the rollout engines",
        )
        for key, override in (
            ("serving.weight_deltas", "serving.weight_deltas=true"),
            ("serving.weights", "serving.weights=broadcast"),
        )
    ),
    ((*SERVERS, "rollout.sleep=true"), "rollout.sleep", "servers have devices of their own"),
    (
        (*SERVERS, "serving.models.policy.max_context_tokens=9"),
        "serving.models.policy.max_context_tokens",
        "limit the policy",
    ),
    (
        (
            *_elsewhere("groups: {m: {num_devices: 1}}, key_variable: NO_SUCH_KEY"),
            "serving.num_devices_per_node=2",
        ),
        "serving.models.judge.key_variable",
        "the model has no urls",
    ),
    (
        (_groups(a="num_devices: 1, engine_args: {chunked_prefill_size: 64}"),),
        "serving.models.policy.groups.a.engine_args",
        "rollout.engine=hf",
    ),
    (("agent.columns=[a]",), "agent.columns", "a single turn has no program that gets them"),
    (("agent.command=[sh]",), "agent.command", "agent.loop=single_turn runs no program"),
    (("agent.environment=Calculator",), "agent.environment", "agent.loop=single_turn plays none"),
    (("agent.tools=[calculator]",), "agent.tools", "agent.loop=single_turn calls none"),
    ((*PLAYED, "agent.tools=[calculator]"), "agent.tools", "agent.loop=environment calls none"),
    (
        ("agent=proxy", "data=calculator", "agent.command=[sh]", "agent.tools=[calculator]"),
        "agent.tools",
        "agent.loop=proxy calls none",
    ),
    (("agent.search_folder=x",), "agent.search_folder", "agent.tools has no search"),
    (("agent.sandbox=docker:x",), "agent.sandbox", "agent.tools has no python"),
    (
        (
            *("reward.function=null", "reward.args={n: 1}"),
            "reward.functions={a: {function: exact_match}}",
        ),
        "reward.args",
        "each of reward.functions",
    ),
    *(
        ((f"algorithm.{part}_args={{a: 1}}",), f"algorithm.{part}_args", f"{part}=null")
        for part in ("token_mask", "rollout_correction", "group_filter")
    ),
    (("algorithm.max_sampling_rounds=2",), "algorithm.max_sampling_rounds", "group_filter=null"),
    (("algorithm.kl.gradient=k2",), "algorithm.kl.gradient", "kl.placement=none"),
    (("algorithm.kl.target_nats=0.1",), "algorithm.kl.target_nats", "kl.placement=none"),
    (("algorithm.kl.coefficient=0.1",), "algorithm.kl.coefficient", "kl.placement=none"),
    (
        (
            *(*_FOLDER, "model.path=model", "algorithm=distillation"),
            *("algorithm.teacher_path=model", "algorithm.soft_overlong_tokens=4"),
        ),
        "algorithm.soft_overlong_tokens",
        "reads no reward",
    ),
    (("algorithm.teacher_path=model",), "algorithm.teacher_path", "reads no teacher"),
    (("algorithm.teacher_paths={a: model}",), "algorithm.teacher_paths", "reads no teacher"),
    (("algorithm.teacher_prompt=a",), "algorithm.teacher_prompt", "reads no teacher"),
    (("algorithm.divergence_beta=0",), "algorithm.divergence_beta", "divergence_coefficient=0"),
    (("algorithm.divergence_top_k=8",), "algorithm.divergence_top_k", "divergence_coefficient=0"),
    ((*SERVERS, "serving.on_update=finish"), "serving.on_update", "leaves no response open"),
    (("eval.in_background=true",), "eval.in_background", "nothing is sampled while"),
    (
        (*AHEAD, "eval.in_background=true", "eval.every_num_steps=0"),
        "eval.in_background",
        "nothing is evaluated",
    ),
]
BROKEN += [(typed, key, f"would be ignored, because .*{why}") for typed, key, why in UNREAD]
BROKEN_FILES = [
    ("nowhere.jsonl", "does not exist"),
    ("empty.jsonl", "0 bytes"),
    ("train.txt", "must end in"),
    ("empty", "is a folder without state.json"),
    ("splits", "holds several splits: test, train"),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Files of many kinds, for tests that change none of them."""
    files = tmp_path_factory.mktemp("files")
    for name, text in {
        "model/config.json": '{"model_type": "qwen3", "max_position_embeddings": 64}',
        "judge/config.json": '{"model_type": "qwen3", "vocab_size": 9}',
        "judge/tokenizer.json": "{}",
        "judge/model.safetensors": NO_TENSORS,
        "taught/config.json": '{"model_type": "qwen3", "vocab_size": 512}',
        "taught/tokenizer.json": "{}",
        "taught/model.safetensors": NO_TENSORS,
        "list/config.json": "[]",
        "unknown/config.json": '{"model_type": "mamba2"}',
        "copy.py": "def copy(folder, step): pass\n",
        "own.py": "def distance(old_logprobs_BL, reference_logprobs_BL):\n    return None\n",
        "small/config.json": '{"model_type": "qwen3", "vocab_size": 9, "pad_token_id": 9}',
        "endless/config.json": '{"model_type": "qwen3", "vocab_size": 9}',
        "endless/generation_config.json": '{"eos_token_id": [1, 9]}',
        "torn/config.json": '{"model_type": "qwen3"}',
        "torn/model.safetensors.index.json": "{}",
        "wordless/config.json": '{"model_type": "qwen3"}',
        "wordless/model.safetensors": NO_TENSORS,
        "wordless/tokenizer_config.json": "{}",
        "weightless/config.json": '{"model_type": "qwen3"}',
        "weightless/tokenizer.json": "{}",
        "half/config.json": '{"model_type": "qwen3"}',
        "half/tokenizer.json": "{}",
        "half/model-00001-of-00002.safetensors": NO_TENSORS,
        "void/config.json": '{"model_type": "qwen3"}',
        "void/tokenizer.json": "{}",
        "void/model.safetensors": "",
        "cut/config.json": '{"model_type": "qwen3"}',
        "cut/tokenizer.json": "{}",
        "cut/model.safetensors": "\x38"
        + 7 * "\0"
        + '{"w":{"dtype":"F32","shape":[9],"data_offsets":[0,36]} }',
        "page/config.json": '{"model_type": "qwen3"}',
        "page/tokenizer.json": "{}",
        "page/model.safetensors": "<html>not found</html>",
        "half/model.safetensors.index.json": json.dumps(
            {"weight_map": {f"w{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
        ),
        "tied_moe/config.json": '{"model_type": "qwen3_moe", "tie_word_embeddings": true}',
        "narrow/config.json": json.dumps(
            {"model_type": "qwen3", "hidden_size": 384, "num_attention_heads": 12}
            | {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 510}
        ),
        "dense_moe/config.json": '{"model_type": "qwen2_moe", "mlp_only_layers": [1]}',
        "mixtral/config.json": '{"model_type": "mixtral"}',
        "shared/config.json": json.dumps(
            QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 35}
        ),
        "mistral/config.json": '{"model_type": "mistral"}',
        "moe/config.json": json.dumps(QWEN3_MOE),
        "scorer/config.json": _scorer("qwen3"),
        "labels/config.json": _scorer("qwen3", num_labels=2),
        "phi3_scorer/config.json": _scorer("phi3", kind="Token"),
        "gemma/config.json": '{"model_type": "gemma3_text"}',
        "eyes/config.json": json.dumps(QWEN3_5_9B | {"vision_config": TOWER}),
        "eyes/preprocessor_config.json": "{}",
        "blind/config.json": json.dumps(QWEN3_5_9B | {"vision_config": TOWER}),
        "capped/config.json": '{"model_type": "gemma3_text", "final_logit_softcapping": 30.0}',
        "dynamic/config.json": json.dumps(
            {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}
        ),
        "phi/config.json": '{"model_type": "phi3"}',
        "long/config.json": json.dumps(
            {
                "model_type": "phi3",
                "rope_scaling": {"type": "su"},
                "original_max_position_embeddings": 64,
            }
        ),
        "empty/README": "",
        "train.jsonl": '{"prompt": "1", "answer": "1"}\n',
        "splits/dataset_dict.json": "{}",
        "splits/train/state.json": "{}",
        "splits/test/state.json": "{}",
        "empty.jsonl": "",
        "reward.py": "def score(responses, **_):\n    return [0.0 for _ in responses]\n",
        "broken.py": "def score(:\n",
        "outside.py": "def score(**_): ...\nreturn 1\n",
        "rewards.py": REWARDS,
        "rewards.txt": REWARDS,
        "old/config.yaml": "mode: train\n",
        "old/metrics.jsonl": "{}\n",
        "old/rollouts/step-000000001-train-0.json": "{}",
    }.items():
        (files / name).parent.mkdir(exist_ok=True, parents=True)
        (files / name).write_text(text)
    adapters: dict[str, dict[str, object]] = {"adapter": {}, "dora": {"use_dora": True}}
    for name, changes in adapters.items():
        _write_adapter(files / name, changes)
    _write_adapter(files / "seen", {}, tower=("visual.blocks.0.attn.qkv",))
    before = _contents_of(files)
    yield files
    assert _contents_of(files) == before


def _contents_of(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {path: path.read_bytes() if path.is_file() else b"" for path in paths}


@pytest.fixture(autouse=True)
def _here(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


@pytest.fixture
def folder(files: Path, _here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the files, for a test that changes some."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _write_adapter(folder: Path, changes: dict[str, object], tower: tuple[str, ...] = ()) -> None:
    """Write an adapter of rank 2 for the first block of the default model, and of a tower."""
    modules = ("q_proj", "o_proj")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": list(modules)}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings | changes))
    layers = (*(f"layers.0.self_attn.{module}" for module in modules), *tower)
    shapes = {"lora_A": (2, 192), "lora_B": (192, 2)}
    tensors = {
        f"base_model.model.model.{layer}.{matrix}.weight": np.zeros(shape, np.float32)
        for layer in layers
        for matrix, shape in shapes.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors")


def violations_of(*overrides: str) -> tuple[ConfigError, ...]:
    with pytest.raises(ConfigErrors) as caught:
        config_of(*overrides)
    return caught.value.violations


@cache
def refused(overrides: tuple[str, ...]) -> tuple[tuple[ConfigError, ...], set[tuple[str, int]]]:
    """Violations of an example, and the place of each call of ``error`` that was reached."""
    reached, error = set(), messages.error

    def recording(*args: Any, **kwargs: Any) -> ConfigError:
        caller = sys._getframe(1)
        reached.add((caller.f_code.co_filename, caller.f_lineno))
        return error(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        for name, module in sys.modules.items():
            if name.startswith("hybridrl.config.checks.") and "error" in vars(module):
                patch.setitem(vars(module), "error", recording)
        return violations_of(*overrides), reached


@pytest.mark.shows("1.12", "4.10", "6.4")
@pytest.mark.parametrize(("overrides", "key", "word"), BROKEN)
def test_a_broken_rule_is_named_and_each_remedy_mends_it(
    overrides: tuple[str, ...], key: str, word: str
) -> None:
    violations, _ = refused(overrides)
    found = [v for v in violations if v.key == key and (word in v.rule or re.match(word, v.rule))]
    assert len(found) == 1, [str(v) for v in violations]
    assert "Fix: " in str(found[0])
    for remedy in found[0].remedies:
        mended = with_overrides(values_of(*overrides), remedy)
        assert load_config(mended) is not None, remedy
    for violation in violations:  # every remedy stands in the message that the user reads
        for remedy in violation.remedies:
            for override in remedy:
                key_of_remedy = override.partition("=")[0]
                assert key_of_remedy in str(violation) or "did you mean" in str(violation)
            assert shlex.split(instruction(remedy))[1:] == list(remedy)


def test_each_key_of_the_table_has_an_example_and_its_default_is_that_of_the_files() -> None:
    rows = [row for rows in unread_keys().values() for row in rows]
    keys = {key: usual for row in rows for key, usual in row.get("keys", {}).items()}
    patterns = [re.escape(key).replace(r"\*", "[^.]+") for key in keys]
    named = {key for _, key, _ in UNREAD}
    assert [p for p in patterns if not any(re.fullmatch(p, key) for key in named)] == []
    usual = config_of()
    for key, default in keys.items():
        if "*" not in key and "_args." not in key and key != "data.task":
            value = messages.value_at(usual, key)
            assert (list(value) if isinstance(value, tuple) else value) == default, key


def test_a_plan_needs_neither_data_nor_reward_nor_sglang() -> None:
    keys = ("data.train_files=[nowhere.jsonl]", "reward.function=nowhere.py:f")
    overrides = (*FILES, *keys, "trainer.run_dir=model")
    missing = {violation.key for violation in violations_of(*overrides, "mode=check")}
    assert missing == {"data.train_files", "reward.function", "trainer.run_dir"}
    assert config_of(*overrides, "mode=plan").mode == "plan"
    planned = [rule for rules in rules_of("plan").values() for rule in rules]
    assert check_sglang_is_installed not in planned


@pytest.mark.parametrize(("file", "word"), BROKEN_FILES)
def test_an_unusable_data_file_is_named(file: str, word: str) -> None:
    violations = violations_of(*FILES, f"data.train_files=[train.jsonl,{file}]")
    assert [v.key for v in violations] == ["data.train_files"]
    assert file in str(violations[0])
    assert word in violations[0].rule


def _places_of_errors() -> dict[tuple[str, int], str]:
    """Each call of `error` in the checks, by file and line, with its code."""
    return {
        (str(file), node.lineno): ast.unparse(node)
        for file in Path(messages.__file__).parent.glob("*.py")
        if file.stem != "messages"
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "error"
    }


def test_every_error_has_an_example_that_raises_it() -> None:
    examples = [overrides for overrides, _, _ in BROKEN]
    examples += [(*FILES, f"data.train_files=[{file}]") for file, _ in BROKEN_FILES]
    reached = set().union(*(refused(overrides)[1] for overrides in examples))
    unreached = {code for place, code in _places_of_errors().items() if place not in reached}
    # Their tests take SGLang, megatron-core, bm25s and wandb away, or write a function.
    assert unreached == {
        "error(config, 'rollout.engine', 'SGLang is not installed', 'rollout.engine=hf', fix=fix)",
        "error(config, key, 'megatron-core is not installed', f'{key}=fsdp2', fix=fix)",
        "error(config, _TOOLS, rule, without, fix=fix)",
        "error(config, key, f\"not installed: {', '.join(missing)}\", usable, fix=fix)",
        "error(config, key, 'it is a function of another framework', fix=fix)",
    }


TOOLS = ("agent=tool_calls", "data=calculator")


@pytest.mark.parametrize(
    ("missing", "extra", "given", "remedy"),
    [
        ("sglang", "sglang", SGLANG, ("rollout.engine=hf",)),
        ("megatron", "megatron", MEGATRON, ("actor.engine=fsdp2",)),
        ("megatron.core", "megatron", MEGATRON, ("actor.engine=fsdp2",)),
        (
            *("bm25s", "search"),
            (*TOOLS, "agent.tools=[search]", "agent.search_folder=empty"),
            ("agent.tools=[]", "agent.search_folder=null"),
        ),
        (
            *("mcp", "mcp", (*TOOLS, 'agent.tools=["mcp:python server.py",calculator]')),
            ("agent.tools=[calculator]",),
        ),
        (
            *("wandb", "wandb", ("tracking.trackers=[tensorboard,wandb]",)),
            ("tracking.trackers=[tensorboard]",),
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_extra(
    missing: str,
    extra: str,
    given: tuple[str, ...],
    remedy: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    (violation,) = violations_of(*given)
    assert f"pip install 'hybridrl[{extra}]'" in str(violation)
    assert violation.remedies == (remedy,)
    assert load_config(with_overrides(values_of(*given), remedy))


def test_trackers_that_are_installed_are_accepted() -> None:
    trackers = config_of("tracking.trackers=[tensorboard,wandb,mlflow]").tracking.trackers
    assert trackers == ("tensorboard", "wandb", "mlflow")


def test_context_parallel_ranks_have_the_same_rows_on_any_device() -> None:
    sizes = (*MEGATRON, "cluster.num_ranks_per_node=4", "megatron.context_parallel_size=2")
    assert config_of(*sizes).num_train_groups == 2
    assert config_of(*MEGATRON, *GPUS, "megatron.context_parallel_size=2").num_train_groups == 4
    shared = config_of(*GPUS, "actor.fsdp2.context_parallel_size=2")
    assert shared.num_train_groups == shared.num_critic_groups == 4


def test_transformer_engine_is_accepted_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = (*MEGATRON, *GPUS, "megatron.layers=transformer_engine")
    assert violations_of(*given)[0].key == "megatron.layers"
    (tmp_path / "transformer_engine.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert config_of(*given).num_train_groups == 8
    fp8 = "megatron.transformer_args={fp8: hybrid}"
    assert config_of(*MEGATRON, *GPUS, fp8).megatron.transformer_args == {"fp8": "hybrid"}
    local = violations_of(*MEGATRON, *GPUS, "megatron.layers=local", fp8)
    assert [violation.key for violation in local] == ["megatron.transformer_args.fp8"]


def test_all_sizes_that_do_not_divide_are_told_at_once() -> None:
    given = (
        *(*MOE, *GPUS, "cluster.num_ranks_per_node=6", "megatron.tensor_parallel_size=3"),
        *("megatron.pipeline_parallel_size=3", "megatron.expert_parallel_size=5"),
        "trainer.num_prompts_per_step=18",
    )
    found = violations_of(*given)
    assert {violation.key for violation in found} == {
        "cluster.num_ranks_per_node",
        "megatron.tensor_parallel_size",
        "megatron.pipeline_parallel_size",
        "megatron.sequence_parallel",
        "megatron.expert_parallel_size",
    }
    mended = with_overrides(
        values_of(*given),
        (
            *("megatron.tensor_parallel_size=2", "megatron.pipeline_parallel_size=2"),
            *("megatron.sequence_parallel=true", "megatron.expert_parallel_size=4"),
            "cluster.num_ranks_per_node=8",
        ),
    )
    assert load_config(mended | {"trainer": mended["trainer"] | {"num_prompts_per_step": 16}})


def test_a_section_that_divides_is_accepted_and_counts_its_data_parallel_ranks() -> None:
    config = config_of(
        *(*MEGATRON, *SGLANG, *TP2, *PP2, "megatron.num_virtual_stages=2"),
        *("cluster.num_ranks_per_node=8", "megatron.sequence_parallel=true"),
    )
    assert (config.num_train_groups, config.num_critic_groups) == (2, 2)
    assert config.megatron_worlds == {"cluster.num_ranks_per_node": 8}
    moe = config_of(
        *(*MOE, *GPUS, *TP2, "megatron.sequence_parallel=true"),
        *("megatron.expert_parallel_size=8", "actor.replay_routing=true"),
        "megatron.load_balance_coefficient=0.001",
    )
    assert moe.num_train_groups == 4


def test_columns_of_a_built_in_task_are_held_to_nothing() -> None:
    assert config_of("data.prompt_key=answer").data.task == "sort_digits"


def test_a_warm_up_that_ends_before_the_run_is_accepted() -> None:
    given = ("algorithm=ppo", "actor.optimizer.num_warmup_steps=94")
    assert config_of(*given).num_policy_updates == 95
    assert violations_of("algorithm=ppo", "actor.optimizer.num_warmup_steps=95")


def test_what_learns_keeps_float32_but_a_frozen_base_need_not() -> None:
    assert config_of(*MEGATRON, *LORA, "model.dtype=bfloat16").model.dtype == "bfloat16"


def test_the_section_that_nobody_changed_is_that_of_the_file() -> None:
    assert config_of().megatron == MegatronConfig()


def test_what_megatron_alone_knows_passes_through() -> None:
    given = config_of(*MEGATRON, "megatron.transformer_args={bias_activation_fusion: true}")
    assert given.megatron.transformer_args == {"bias_activation_fusion": True}


def test_a_hook_that_is_there_is_accepted_and_its_module_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "unread_hooks.py").write_text("raise SystemExit\ndef install(): ...\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        config = config_of("cluster.worker_setup_hook=unread_hooks.install")
        assert config.cluster.worker_setup_hook == "unread_hooks.install"
        (violation,) = violations_of("cluster.worker_setup_hook=unread_hooks.sub.install")
        assert "there is no module unread_hooks.sub" in violation.rule


def test_what_sglang_alone_knows_passes_through() -> None:
    given = config_of(
        *SGLANG, "rollout.engine_args={chunked_prefill_size: 512, lora_backend: triton}"
    )
    assert given.rollout.engine_args == {"chunked_prefill_size": 512, "lora_backend": "triton"}


def test_sglang_computes_in_float32_with_attention_in_triton() -> None:
    in_triton = "rollout.engine_args={attention_backend: triton}"
    assert config_of(*SERVED, "rollout.dtype=float32", in_triton).rollout.dtype == "float32"


def test_all_violations_of_all_sections_are_reported_at_once() -> None:
    keys = [
        violation.key
        for violation in violations_of(
            "rollout.top_p=2.0",
            "algorithm.kl.coefficient=0.1",
            "data.use_chat_template=true",
            "cluster.num_ranks_per_node=0",
            "trainer.num_steps='7'",
        )
    ]
    assert sorted(keys) == [
        "algorithm.kl.coefficient",
        "cluster.num_ranks_per_node",
        "data.use_chat_template",
        "rollout.top_p",
        "trainer.num_steps",
    ]


def test_supervised_mode_does_not_ask_for_what_only_sampling_needs() -> None:
    assert config_of("mode=sft", "rollout.num_responses_per_prompt=1").mode == "sft"


@pytest.mark.usefixtures("folder")
def test_an_existing_run_folder_may_be_replaced_on_request() -> None:
    assert config_of("trainer.run_dir=old", "trainer.overwrite=true").trainer.overwrite
    Path("new").mkdir()
    assert config_of("trainer.run_dir=new").trainer.run_dir == "new"


@pytest.mark.parametrize("name", ["few", "later", "within", "made", "decorated"])
def test_a_function_of_the_reward_file_is_accepted(name: str) -> None:
    assert config_of("reward.function=reward.py:score").reward.function == "reward.py:score"
    assert config_of(f"reward.function=rewards.py:{name}").reward.function == f"rewards.py:{name}"


OF_OTHERS = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...
async def format_reward(prompts, completions, **kwargs): ...
def solved(completions, answer, **kwargs): ...
async def custom_rm(args, sample, **kwargs):
    return sample.label in sample.response
def in_metadata(args, sample):
    return sample.metadata["key"] in sample.response
def reward_func(queries, prompts, labels):
    return {"rewards": [len(q) - len(p) for q, p in zip(queries, prompts)], "extra_logs": labels}
"""


LINES = {
    "compute_score": "def scored(source, response, answer, extra_info): return compute_score("
    "data_source=source, solution_str=response, ground_truth=answer, extra_info=extra_info)",
    "format_reward": "async def scored(prompts, responses): return await format_reward("
    "prompts=prompts, completions=responses)",
    "solved": "def scored(responses, answers): return solved("
    "completions=responses, answer=answers)",
    "custom_rm": "async def scored(prompt, response, answer): return await custom_rm(args=None, "
    'sample=type("Sample", (), dict(prompt=prompt, response=response, label=answer)))',
    "in_metadata": "def scored(prompt, response, answer, metadata): return in_metadata(args=None, "
    'sample=type("Sample", (), dict(prompt=prompt, response=response, label=answer, '
    "metadata=metadata)))",
    "reward_func": "def scored(prompts, responses, answers): return [*map(float, (reward_func("
    "queries=[p + r for p, r in zip(prompts, responses)], prompts=prompts, labels=answers))"
    '["rewards"])]',
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("name", "line"), LINES.items())
def test_a_reward_of_another_framework_gets_a_line_to_add(name: str, line: str) -> None:
    Path("theirs.py").write_text(OF_OTHERS)
    files = (*FILES, "data.train_files=[train.jsonl]")
    (violation,) = violations_of(*files, f"reward.function=theirs.py:{name}")
    assert f"add the line `{line}` to theirs.py" in str(violation)
    assert "then set reward.function=theirs.py:scored" in str(violation)
    Path("theirs.py").write_text(f"{OF_OTHERS}{line}")
    scored = config_of(*files, "reward.function=theirs.py:scored").reward
    own = {"compute_score": ("extra_info",), "in_metadata": ("metadata",)}
    assert scored.own_columns == own.get(name, ())


def test_the_lines_for_slime_and_openrlhf_give_what_their_functions_return() -> None:
    scope: dict[str, Any] = {}
    exec(f"{OF_OTHERS}\n{LINES['custom_rm']}", scope)
    assert asyncio.run(scope["scored"]("p", "it is 4", "4")) is True
    exec(LINES["reward_func"], scope)
    assert scope["scored"](["ab", "c"], ["def", ""], ["x", "y"]) == [3.0, 0.0]


def test_a_plan_needs_no_rows() -> None:
    assert config_of("mode=plan", "data.task=null").data.train_files == ()


def test_a_mistyped_reward_is_answered_with_the_functions_of_the_file() -> None:
    (violation,) = violations_of("reward.function=rewards.py:scalde")
    assert "Fix: did you mean 'scaled'?" in str(violation)


def test_reward_columns_are_those_of_the_process_that_calls() -> None:
    assert (BATCH_COLUMNS, ROW_COLUMNS) == (child.BATCH_COLUMNS, child.ROW_COLUMNS)


def test_paths_that_cannot_be_looked_at_are_named(folder: Path) -> None:
    (folder / "circle").symlink_to("circle")
    for path, reason in (("a" * 300, "File name too long"), ("circle", "symbolic links")):
        given = {
            "model.path": ("model.starter=null", f"model.path={path}"),
            "trainer.run_dir": (f"trainer.run_dir={path}/run",),
            "reward.function": (f"reward.function={path}/r.py:score",),
            "lora.init_from": (*LORA, f"lora.init_from={path}"),
            "data.train_files": (*FILES, f"data.train_files=[{path}/rows.jsonl]"),
        }
        for key, overrides in given.items():
            (violation,) = [v for v in violations_of(*overrides) if v.key == key]
            assert reason in violation.rule, violation


def test_a_critic_needs_no_siblings_and_what_it_lacks_matters_only_where_it_is_asked() -> None:
    config = config_of("algorithm=ppo", "rollout.num_responses_per_prompt=1")
    assert config.has_critic
    assert config.num_policy_updates == 95
    broken = (
        "critic.num_minibatches=3",
        "critic.num_warmup_steps=1000",
        "critic.num_ranks_per_node=1",
    )
    config = config_of(*broken)
    assert not config.has_critic
    assert not config.has_critic_pool
    assert config.num_policy_updates == 100


def test_an_adapter_goes_to_own_engines_beside_a_judge_whose_requests_are_halved() -> None:
    halves = "a: {num_devices: 1, worker_type: prefill}, b: {num_devices: 1, worker_type: decode}"
    models = JUDGED.replace("path: model, groups: {m: {num_devices: 1}}", f"groups: {{{halves}}}")
    judge = models.replace("judge: {", "judge: {path: judge, ")
    keys = (*SGLANG, judge, "serving.num_devices_per_node=3", *ASKING, *LORA)
    assert load_config(values_of(*keys)).lora.sends_adapters


def test_engines_have_an_adapter_of_each_version_that_may_be_open_and_of_the_newest() -> None:
    finish = (*LORA, *AHEAD, "serving.on_update=finish")
    assert config_of(*finish).num_adapters == 3
    for keys in (
        (*LORA, *AHEAD),  # open responses go on with the next one
        (*finish, "lora.sync=merged"),
        (*finish, "rollout.verify_weights=always"),
        (*finish, *SGLANG, "serving.router=sglang"),
        (*LORA, *SERVERS),
    ):
        assert config_of(*keys).num_adapters == 1


@pytest.mark.usefixtures("folder")
def test_an_adapter_that_fits_is_accepted_and_one_that_is_torn_is_named() -> None:
    assert config_of(*ADAPTER).lora.init_from == "adapter"
    weights = Path("adapter/adapter_model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    (violation,) = violations_of(*ADAPTER)
    assert "adapter_model.safetensors is missing, incomplete or corrupt" in violation.rule
    weights.unlink()
    (violation,) = violations_of(*ADAPTER)
    assert "No such file or directory: adapter/adapter_model.safetensors" in violation.rule
    for text, word in (('{"r": 2', "delimiter"), ('{"r": 2}', "does not say"), ("[]", "does not")):
        Path("adapter/adapter_config.json").write_text(text)
        (violation,) = violations_of(*ADAPTER)
        assert word in violation.rule


def test_a_critic_of_a_model_that_could_see_is_one_of_its_language_model_alone() -> None:
    assert config_of(*_FOLDER, "model.path=blind", "algorithm=ppo").has_critic


@pytest.mark.parametrize("mode", ["sft", "dpo"])
def test_experts_are_adapted_where_no_engine_samples(mode: str) -> None:
    config = config_of(*MEGATRON, *LORA, *_FOLDER, "model.path=moe", f"mode={mode}")
    assert "up_proj" in config.lora.modules


def test_rank_zero_is_refused_with_a_legal_one() -> None:
    (violation,) = violations_of(*LORA, "lora.rank=0")
    assert (violation.key, violation.remedies) == ("lora.rank", (("lora.rank=1",),))


def test_a_section_that_is_off_is_held_to_nothing() -> None:
    config = config_of("lora.target_modules=[nothing]", "lora.rank=4096", "lora.init_from=nowhere")
    assert not config.lora.sends_adapters


@pytest.mark.usefixtures("folder")
def test_the_rank_is_held_against_the_config_of_a_model_folder() -> None:
    shape: dict[str, object] = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
    }
    shape |= {"head_dim": 8, "intermediate_size": 128, "max_position_embeddings": 64}
    Path("model/config.json").write_text(json.dumps(shape))
    folder = ("model.starter=null", "model.path=model", *LORA)
    (violation,) = violations_of(*folder, "lora.rank=9")
    assert "at most 8: k_proj has 64 inputs and 8 outputs" in violation.rule
    assert config_of(*folder, "lora.rank=9", "lora.target_modules=[q_proj,down_proj]").lora.enabled
