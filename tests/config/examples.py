"""Examples of what users type: what breaks a rule, what nobody would read, and what is legal.

In the texts an example is what is typed, with the names of tuples here in place of their overrides,
and indented below it KEY: WORDS of the rule; ``...`` stands for other words between them.
"""

from __future__ import annotations

import re

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
SGLANG = ("rollout=sglang",)
CORRECTED = ("algorithm.rollout_correction=importance",)
SERVED = (*SGLANG, "cluster=one_gpu", "rollout.dtype=bfloat16", "rollout.sleep=true")
ADAPTER = (
    *("lora=default", "lora.init_from=adapter", "lora.rank=2", "lora.alpha=2"),
    *("lora.target_modules=[o_proj,q_proj]", "model.starter.num_layers=1"),
)
MIXTRAL = (
    *(*MEGATRON, "rollout=sglang", "rollout.dtype=bfloat16"),
    *("model.starter=null", "model.path=mixtral"),
)
FOLDER = ("model.starter=null", "data.use_chat_template=false")
GEMMA = (*FOLDER, "model.path=gemma")
SELF = ("algorithm=gkd", "algorithm.teacher_path=initial")
PLAYED = ("agent=environment", "data=calculator", "reward.function=agent")
TOOLS = ("agent=tool_calls", "data=calculator")
SCORER = ("reward.function=model",)
MASKS = ("rollout.sampling_masks=true",)
MIX = (*FILES, "data.sources={a: {files: [train.jsonl]}}")
SERVERS = ("serving=own",)
ELSEWHERE = ("serving.models={p: {urls: ['http://a:1']}}", "serving.num_devices_per_node=0")
COLOCATED = (*SERVERS, "serving.colocated=true", "rollout.sleep=true")
AHEAD = (*SERVERS, "trainer.max_staleness=2", "algorithm.rollout_correction=importance")
OPEN = ("rollout.oversample=1.5", "algorithm.rollout_correction=importance")
JUDGED = (
    "serving.models={p: {groups: {m: {num_devices: 1}}}, "
    "judge: {path: model, groups: {m: {num_devices: 1}}}}",
    "serving.num_devices_per_node=2",
)
EYES = (*SEEING, *SGLANG, "serving.num_devices_per_node=3")
ENCODER = (
    *EYES,
    "serving.models={policy: {groups: {eyes: {num_devices: 2, worker_type: encoder}, "
    "main: {num_devices: 1}}}}",
)
ASKING = ("reward.function=judge", "reward.args={model: judge, template: '{response}'}")
ASKED = (
    "serving.models={p: {groups: {m: {num_devices: 1}}}, judge: {path: judge}}",
    *ASKING,
)
TAUGHT = (
    "serving.models={p: {groups: {m: {num_devices: 1}}}, "
    "t: {path: taught, groups: {m: {num_devices: 1}}}}",
    *("serving.num_devices_per_node=2", "algorithm=gkd", "algorithm.teacher_path=serving.models.t"),
)
HALVES = (
    *("serving.num_devices_per_node=2", "cluster.device=cpu"),
    "serving.models={policy: {groups: {a: {num_devices: 1, worker_type: prefill}, "
    "b: {num_devices: 1, worker_type: decode}}}}",
)

Example = tuple[tuple[str, ...], str, str]
"""What the user typed, the key that is named, and words of the rule."""

_NAMED = {name: overrides for name, overrides in globals().items() if name.isupper()}


def _read(text: str) -> list[Example]:
    examples = []
    for typed, below in re.findall(r"((?:^\S.*\n)+)((?:^ .*\n)+)", text, re.MULTILINE):
        key, _, rule = " ".join(below.split()).partition(": ")
        overrides: list[str] = []
        for part in re.split(r" (?=~|[a-z][\w.]*=)", " ".join(typed.split())):
            names = part.split(" ") if part.isupper() else []
            overrides += [one for name in names for one in _NAMED[name]] or [part]
        examples.append((tuple(overrides), key, rule))
    return examples


BROKEN = _read("""
trainer.max_staleness=1
    trainer.max_staleness: the ranks of the policy have
AHEAD algorithm.rollout_correction=null
    algorithm.rollout_correction: trainer.max_staleness=2 learns from tokens of earlier weights
AHEAD rollout.dump=true
    trainer.max_staleness: all prompts of a call in one file
AHEAD PLAYED serving.on_update=abort
    serving.on_update: agent.loop=environment holds conversations
SERVERS cluster.num_nodes=3 cluster.ray_address=auto
    serving.num_devices_per_node: have 6 devices for servers, and the groups of serving.models ask
    for 2
serving.models={policy: {groups: {a: {num_devices: 3, devices_per_engine: 2}}}}
serving.num_devices_per_node=3
    serving.models.policy.groups.a.devices_per_engine: must divide the 3 devices of the group
SGLANG cluster.num_nodes=2 cluster.ray_address=auto serving.models={policy: {groups: {a:
{num_devices: 2}, b: {num_devices: 4, devices_per_engine: 2}}}} serving.num_devices_per_node=3
    serving.models.policy.groups.b.devices_per_engine: from device 2 on, an engine would lie on two
    nodes of 3 devices
SERVERS serving.models.policy.path=model
    serving.models.policy.path: no model is the policy
serving.models={a: {groups: {m: {num_devices: 1}}}, b: {groups: {}}}
    serving.models.b.path: the policy is served as a already
serving.models={policy: {groups: {a: {num_devices: 1, worker_type: placeholder}}}}
    serving.models.policy.groups: the model has no engine
serving.models={policy: {groups: {a: {num_devices: 1, worker_type: prefill}}}}
    serving.models.policy.groups.a.worker_type: needs a group of type decode
serving.models={policy: {groups: {a: {num_devices: 1, worker_type: prefill}, b: {num_devices: 1,
worker_type: decode}}}} serving.num_devices_per_node=2
    serving.models.policy.groups.b.worker_type: rollout.engine=hf has no halves
ENCODER model=starter data=sort_digits
    serving.models.policy.groups.eyes.worker_type: this model sees no images
ENCODER rollout=hf
    serving.models.policy.groups.eyes.worker_type: rollout.engine=hf has no halves, and no encoders
ENCODER serving.models.policy.groups.eyes.devices_per_engine=2
    serving.models.policy.groups.eyes.worker_type: it takes weights on one
ENCODER serving.weights=broadcast
    serving.models.policy.groups.eyes.worker_type: it joins no process group
ENCODER serving.colocated=true rollout.sleep=true serving.models.policy.groups.eyes.num_devices=1
serving.models.policy.groups.main.num_devices=2
    serving.models.policy.groups.eyes.worker_type: SGLang's encoder gives no memory back
EYES serving.models={policy: {groups: {eyes: {num_devices: 1, worker_type: encoder}, a:
{num_devices: 1, worker_type: prefill}, b: {num_devices: 1, worker_type: decode}}}}
    serving.models.policy.groups.eyes.worker_type: its embeddings reach no prefill and decode
    engines
SEEING SGLANG serving.models={policy: {groups: {eyes: {num_devices: 1, worker_type: encoder}}}}
    serving.models.policy.groups: the model has no engine
SERVERS serving.colocated=true cluster.num_ranks_per_node=2
    serving.colocated: groups policy.main and the trainer want the same devices
COLOCATED cluster.num_ranks_per_node=4
    serving.num_devices_per_node: all 4 devices of the trainer on a node are devices of the servers,
    too
COLOCATED
    serving.models.policy.groups.main.num_devices: 1 of these devices are the trainer's and the
    others are not
SGLANG COLOCATED cluster.num_nodes=2 serving.num_devices_per_node=1 cluster.ray_address=auto
serving.models={policy: {groups: {main: {num_devices: 2, devices_per_engine: 2}}}}
    serving.models.policy.groups.main.devices_per_engine: ranks that share an engine lie on one
    node, which has 1
SGLANG COLOCATED serving.num_devices_per_node=3 serving.models={policy: {groups: {a: {num_devices:
1, worker_type: prefill}, b: {num_devices: 2, worker_type: decode}}}}
    serving.colocated: halves of a request stand all on devices of the trainer, or all on their own
COLOCATED ASKING algorithm=ppo serving.models={judge: {path: judge, groups: {m: {num_devices: 1}}},
p: {groups: {m: {num_devices: 1}}}}
    critic.num_ranks_per_node: group m of judge answers until the trainer computes
SERVERS serving.router=sglang
    serving.router: it passes requests to SGLang alone
SERVERS SGLANG MASKS rollout.top_k=8 serving.router=sglang
    serving.router: it drops sampling masks
SERVERS SGLANG model=starter_that_sees serving.router=sglang
    serving.router: it drops the ids of prompts with images
SERVERS SGLANG ELSEWHERE model=starter_that_sees model.freeze_vision=false
    model.freeze_vision: may keep what an older tower made of an image
SGLANG COLOCATED cluster.num_ranks_per_node=2 serving.router=sglang
    serving.router: engines of ranks are asked through their ranks
COLOCATED cluster.num_ranks_per_node=2 serving.faults={it: {kind: stop}}
    serving.faults.it.kind: the manager ends and cuts no engines of ranks
SGLANG serving.models={policy: {groups: {a: {num_devices: 1, engine_args: {tp_size: 2}}}}}
    serving.models.policy.groups.a.engine_args.tp_size: rollout.tensor_parallel_size sets it
serving.models={policy: {groups: {a: {num_devices: 2, devices_per_engine: 2}}}}
serving.num_devices_per_node=2
    serving.models.policy.groups.a.devices_per_engine: rollout.engine=hf computes on one device
JUDGED
    serving.models.judge.path: it has no tokenizer
JUDGED
    serving.models.judge: no reward asks this model
SERVERS ASKING
    reward.args.model: no frozen model is served
JUDGED ASKING reward.args.model=juge
    reward.args.model: serving.models has no frozen model of this name: judge
JUDGED ASKING reward.args.template=good?
    reward.args.template: the judge would not see the response
JUDGED ASKING reward.args.pattern='('
    reward.args.pattern: not a regular expression
ASKED serving.models.judge.urls=['judge:30000']
    serving.models.judge.urls: must be http://HOST:PORT
ASKED serving.models.judge.urls=['http://judge:port']
    serving.models.judge.urls: not a URL
ASKED serving.models.judge.urls=['http://judge:30000/v1']
    serving.models.judge.urls: must end with the port
ASKED serving.models.judge.urls=['http://me:secret@judge:30000']
    serving.models.judge.urls: no user or password
ASKING serving.models={p: {groups: {m: {num_devices: 1}}}, judge: {path: weightless, urls:
['http://a:1']}}
    serving.models.judge.path: has no vocab_size
ASKED serving.models.judge.urls=['http://a:1', 'http://b:2', 'http://a:1']
    serving.models.judge.urls: http://a:1 stands there twice
ASKED serving.models.judge.urls=['http://a:1'] serving.models.judge.groups={m: {num_devices: 1}}
    serving.models.judge.groups: would be ignored: servers that run already
ASKING serving.models={p: {urls: ['http://b:1'], groups: {m: {num_devices: 1}}}, judge: {path:
judge, urls: ['http://a:1']}}
    serving.models.p.groups: would be ignored: servers that run already
SGLANG ELSEWHERE serving.weights=broadcast serving.weight_deltas=true
    serving.weight_deltas: servers that run elsewhere take changes as files
ELSEWHERE
    rollout.engine: servers of SGLang answer for the policy (serving.models.p.urls)
SGLANG serving.models={p: {urls: ['http://a:1']}}
    serving.num_devices_per_node: the groups of serving.models ask for 0 together
SGLANG ELSEWHERE serving.colocated=true rollout.sleep=true
    serving.colocated: servers that run elsewhere answer for the policy
SGLANG ELSEWHERE serving.faults={it: {kind: stop}}
    serving.faults.it.kind: no signal to servers that others started
SGLANG ELSEWHERE LORA
    lora.sync: these servers get full weights
SGLANG COLOCATED LORA serving.num_devices_per_node=1 serving.models={policy: {groups: {main:
{num_devices: 1}}}}
    lora.sync: these servers get full weights
SGLANG HALVES LORA
    lora.sync: these servers get full weights
SGLANG SERVERS LORA serving.weights=broadcast
    serving.weights: engines read the weights below an adapter
ASKED serving.models.judge.urls=['http://a:1'] serving.models.judge.key_variable=NO_SUCH_KEY
    serving.models.judge.key_variable: the environment variable is not set
ASKED serving.models.judge.urls=['http://a:1'] serving.models.judge.key_variable=sk-8rZq2w
    serving.models.judge.key_variable: must be the name of an environment variable
agent.loop=no_one data=calculator
    agent.loop: is not built in
PLAYED agent.environment=null
    agent.environment: plays an environment
PLAYED agent.environment=Chess
    agent.environment: is not built in
PLAYED agent.environment=openenv:host:80
    agent.environment: has an address, as in
PLAYED agent=tool_calls
    reward.function: agent.loop=tool_calls gives no rewards
algorithm=rae
    reward.function: algorithm.advantage=role_baseline reads what the agent gave each player
PLAYED reward.function=exact_match
    reward.function: Calculator would be ignored
PLAYED reward.function=null reward.functions.x={function: exact_match}
    reward.function: Calculator would be ignored
TOOLS agent.tools=[calculator,search]
    agent.search_folder: needs a folder of texts
TOOLS agent.tools=[python] agent.sandbox=http://a:1/run_code agent.tool_timeout_s=10
    agent.tool_timeout_s: may take 20 s
agent.tools=[calculater]
    agent.tools: is not built in; did you mean
agent.tools=[no.py:f]
    agent.tools: no.py does not exist
agent=proxy data=calculator
    agent.command: needs a program
TOOLS agent.columns=[metadata]
    agent.columns: rows of data.task=calculator have no further columns
agent=proxy data=calculator agent.command=[no_such_program]
    agent.command: there is no program 'no_such_program'
TOOLS agent.tools=["mcp:no_such_program -x"]
    agent.tools: there is no program 'no_such_program'
agent=tool_calls
    data.use_chat_template: appends messages in the form
TOOLS MASKS rollout.top_k=8
    rollout.sampling_masks: their masks are not kept
SELF MASKS rollout.top_k=8
    rollout.sampling_masks: their divergence is not finite
SGLANG MASKS rollout.top_p=0.9
    rollout.sampling_masks: 1 < rollout.top_k <= 4096
SGLANG MASKS rollout.top_k=5000
    rollout.sampling_masks: 1 < rollout.top_k <= 4096
SGLANG MASKS rollout.top_k=200 rollout.engine_args={sampling_mask_max_tokens: 100}
    rollout.sampling_masks: 1 < rollout.top_k <= 100
MOE TOOLS actor.replay_routing=true
    actor.replay_routing: their experts are not kept
data=calculator data.use_chat_template=false
    data.use_chat_template: are chat messages
CORRECTED algorithm.rollout_correction_args.reject=token_k1
    algorithm.rollout_correction_args.reject: 'token_k1' is no rule; write it as 0.5 <= token_k1 <=
    2
algorithm=ppo algorithm.loss_aggregation=prompt_mean_token_mean
    algorithm.loss_aggregation: the critic's loss cannot be a mean over prompts
SCORER
    reward.args.path: model needs it and has no default
SCORER reward.args.path=nowhere
    reward.args.path: does not exist
SCORER reward.args.path=model
    reward.args.path: no scalar head
SCORER reward.args.path=labels
    reward.args.path: gives 2 numbers
SCORER reward.args.path=scorer
    reward.args.path: no tokenizer
SCORER reward.args.path=unknown
    reward.args.path: 'mamba2' is not supported
SCORER MEGATRON reward.args.path=phi3_scorer
    reward.args.path: and it is phi3
reward.function=null reward.functions={nice: {function: model, args: {path: model}}}
    reward.functions.nice.args.path: no scalar head
FOLDER model.path=scorer
    model.path: names a classifier
model.starter=null
    model.path: needs a model folder
model.path=model
    model.starter: ignored
model.starter=null model.path=nowhere
    model.path: does not exist
model.starter=null model.path=empty
    model.path: no config.json
LORA model.starter=null model.path=list
    model.path: holds a JSON list, must be an object
LORA model.starter=null model.path=unknown
    model.path: 'mamba2' is not supported yet
LORA model.starter=null model.path=small
    model.path: pad_token_id=9 is not in the vocabulary of vocab_size=9
LORA model.starter=null model.path=endless
    model.path: eos_token_id=9 is not in the vocabulary of 9
LORA model.starter=null model.path=torn
    model.path: weight_map is None
LORA model.starter=null model.path=model mode=check
    model.path: it has no tokenizer: none of tokenizer.json
LORA model.starter=null model.path=wordless mode=check
    model.path: it has no tokenizer
LORA model.starter=null model.path=weightless mode=check
    model.path: it has no model.safetensors
LORA model.starter=null model.path=half mode=check
    model.path: it has no model-00002-of-00002.safetensors
LORA model.starter=null model.path=void mode=check
    model.path: void/model.safetensors is 0 bytes long, and incomplete
LORA model.starter=null model.path=cut mode=check
    model.path: cut/model.safetensors is 64 bytes long, and incomplete
LORA model.starter=null model.path=page mode=check
    model.path: page/model.safetensors is 22 bytes long, and incomplete
model.starter.hidden_size=200
    model.starter.hidden_size: multiple of 12
SEEING model.starter.hidden_size=72
    model.starter.hidden_size: multiple of 16
SEEING algorithm=ppo
    algorithm.advantage: no critic of a model that sees
SEEING mode=reward_model
    mode: no reward model that sees
FOLDER model.path=eyes algorithm=ppo
    algorithm.advantage: without processor_config.json and preprocessor_config.json its folder sees
    nothing
SEEING agent=tool_calls rollout.dump=true
    rollout.dump: images that conversations
SEEING lora.enabled=true model.freeze_vision=false
    lora.sync: apply adapters to the language model alone
data.use_chat_template=true
    data.use_chat_template: learned plain text
data.use_chat_template=true agent=tool_calls
    data.use_chat_template: learned plain text
model.attention=varlen
    model.attention: runs on CUDA in bfloat16
algorithm=ppo critic.num_ranks_per_node=2 actor.fsdp2.num_replicas=2
    actor.fsdp2.num_replicas: number of ranks that train a model, 1 and 2
GPUS actor.fsdp2.context_parallel_size=3
    actor.fsdp2.context_parallel_size: must divide the number of ranks that train a model, 8
GPUS model=hf_folder model.path=eyes actor.fsdp2.context_parallel_size=2
    actor.fsdp2.context_parallel_size: layers with a state (qwen3_5_text)
actor.fsdp2.kernels=liger
    actor.fsdp2.kernels: on CUDA alone
FOLDER model.path=moe actor.fsdp2.kernels=compiled
    actor.fsdp2.kernels: qwen3_moe's experts do not compile
GPUS actor.fsdp2.kernels=liger
    actor.fsdp2.kernels: not installed
rollout.num_responses_per_prompt=1
    rollout.num_responses_per_prompt: responses to the same prompt
algorithm=ppo trainer.num_steps=5
    critic.num_warmup_steps: never learn
trainer.profile_steps=[2,9] trainer.num_steps=5
    trainer.profile_steps: has step 9, and the run ends after trainer.num_steps=5
actor.optimizer.num_warmup_steps=100
    actor.optimizer.num_warmup_steps: never rise
mode=sft trainer.num_steps=5 actor.optimizer.num_warmup_steps=5
    actor.optimizer.num_warmup_steps: takes 5 optimizer steps
algorithm=ppo critic.num_minibatches=3
    critic.num_minibatches: multiple of 3
algorithm=ppo critic.num_ranks_per_node=3
    critic.num_ranks_per_node: multiple of 12 (3 ranks
algorithm.num_epochs=2
    algorithm.old_logprobs: one update
algorithm.kl.placement=reward algorithm.kl.coefficient=0.1
    algorithm.old_logprobs: before the update
algorithm.kl.placement=loss
    algorithm.kl.coefficient: has no effect
algorithm.kl.placement=loss algorithm.kl.coefficient=0.1 algorithm.kl.estimator=k1
    algorithm.kl.estimator: expected gradient is 0
algorithm.advantage=grpoo
    algorithm.advantage: neither a built-in advantage
CORRECTED algorithm.rollout_correction_args={normalize: true}
    algorithm.rollout_correction_args.normalize: before the update
algorithm.advantage='own.py:distance' algorithm.old_logprobs=recompute
    algorithm.kl.placement: reads log-probs of a reference
MIX algorithm.by_source={a: {advantage: 'own.py:distance'}} algorithm.old_logprobs=recompute
    algorithm.kl.placement: that of a source, reads log-probs of a reference
algorithm.soft_overlong_tokens=90
    algorithm.soft_overlong_tokens: at most rollout.max_response_tokens
algorithm=ppo algorithm.group_filter=zero_variance
    algorithm.group_filter: compares responses with a critic
SGLANG rollout.engine_args={port: 1, chunked_prefill_size: 512}
    rollout.engine_args.port: looks for a free one
SGLANG rollout.engine_args={max_lora_rank: 64, lora_backend: triton}
    rollout.engine_args.max_lora_rank: lora.rank sets it
SERVED rollout.dtype=float32
    rollout.dtype: compute in bfloat16
SGLANG rollout.stage_timeout_s=50
    rollout.stage_timeout_s: 30 s more
SGLANG rollout.stage_timeout_s=20
    rollout.stage_timeout_s: 30 s more
SGLANG model.starter=null model.path=tied_moe
    model.path: does not tie that of qwen3_moe
SGLANG model.starter=null model.path=dense_moe
    model.path: gives all layers of qwen2_moe random ones
rollout.oversample=2
    algorithm.rollout_correction: rollout.oversample=2 learns from tokens of earlier weights
OPEN cluster.num_ranks_per_node=4 rollout.oversample=1.3
    rollout.oversample: 21 open prompts (of trainer.num_prompts_per_step=16) must be a multiple of 4
OPEN rollout.oversample=1.00000001
    rollout.oversample: more than a step has
OPEN TOOLS
    rollout.oversample: conversations are not interrupted
OPEN SERVERS
    rollout.oversample: set trainer.max_staleness instead
OPEN rollout.dump=true
    rollout.oversample: all prompts of a call in one file
MOE SGLANG OPEN actor.replay_routing=true
    rollout.oversample: experts of interrupted tokens
rollout.replay=empty
    rollout.replay: rollout.dump=true
trainer.max_staleness=1 rollout.replay=old
    trainer.max_staleness: rollout.replay samples nothing
ASKED serving.models.judge.urls=['http://a:1'] serving.models.judge.max_context_tokens=1000000
    serving.models.judge.max_context_tokens: the context of the model is 32768 tokens
MEGATRON GPUS megatron.layers=local megatron.transformer_args={fp8: hybrid}
    megatron.transformer_args.fp8: it has other layers than megatron.layers=local
algorithm=distillation
    algorithm.teacher_path: reads the log-probs of a teacher
algorithm=gkd
    algorithm.teacher_path: and there is no teacher
algorithm=gkd algorithm.teacher_paths={a: scorer}
    algorithm.teacher_paths.a: has no log-probs
algorithm=gkd algorithm.teacher_path=policy
    algorithm.teacher_path: there is nothing to learn
TAUGHT algorithm.teacher_path=serving.models.u
    algorithm.teacher_path: name: t
TAUGHT algorithm.teacher_paths={a: model}
    algorithm.teacher_paths.a: t is served, and with it all teachers are
TAUGHT reward.function=judge reward.args={model: t, template: '{response}'}
    algorithm.teacher_path: a judge of this name is asked after sampling
TAUGHT SEEING
    algorithm.teacher_path: a served teacher reads no images
TAUGHT serving.models.t.max_context_tokens=9
    algorithm.teacher_path: must have room for a row of
TAUGHT FOLDER model.path=model
    algorithm.teacher_path: their log-probs cannot be compared
TAUGHT algorithm.divergence_top_k=null
    algorithm.divergence_top_k: a served teacher names its likeliest tokens
TAUGHT SGLANG rollout.temperature=0.5
    rollout.temperature: SGLang scores for a served teacher at 1 alone
TAUGHT MASKS algorithm=distillation algorithm.teacher_path=serving.models.t rollout.top_p=0.9
    rollout.sampling_masks: a served teacher scores among all tokens
TAUGHT SGLANG serving.num_devices_per_node=3 serving.models.t.groups={m: {num_devices: 1,
worker_type: prefill}, n: {num_devices: 1, worker_type: decode}}
    algorithm.teacher_path: a decode engine knows no log-probs of a context
SELF algorithm.teacher_prompt='{prompt.upper}'
    algorithm.teacher_prompt: plain names stand in its braces: 'prompt.upper' is none
SELF algorithm.teacher_prompt='{prompt'
    algorithm.teacher_prompt: plain names stand in its braces: expected '}'
SELF algorithm.teacher_prompt='{prompt} {hint}'
    algorithm.teacher_prompt: names hint, and rows of data.task=sort_digits
SELF SEEING algorithm.teacher_prompt='{answer}'
    algorithm.teacher_prompt: a model that sees
SELF MOE SGLANG actor.replay_routing=true algorithm.advantage=distillation
algorithm.divergence_coefficient=0 algorithm.old_logprobs=recompute algorithm.teacher_path=policy
algorithm.teacher_prompt='{answer}'
    algorithm.teacher_prompt: through the experts of its own prompt
SELF TOOLS agent.history=branch algorithm.teacher_prompt='{answer}'
    algorithm.teacher_prompt: gives a row several prompts
MEGATRON SELF TP2 cluster.num_ranks_per_node=2 algorithm.divergence_top_k=null
    algorithm.divergence_top_k: none compares all of it
GPUS GEMMA actor.fsdp2.kernels=liger
    actor.fsdp2.kernels: and this is gemma3_text
algorithm.advantage='own.py:distance' algorithm.kl.placement=loss algorithm.kl.coefficient=0.1
    algorithm.old_logprobs: own.py:distance needs log-probs before the update
FOLDER model.path=model algorithm=distillation algorithm.teacher_path=model
algorithm.old_logprobs=recompute algorithm.kl.placement=reward algorithm.kl.coefficient=0.1
    algorithm.kl.placement: reads no reward
LORA mode=reward_model
    lora.enabled: mode=reward_model trains all weights
rollout.replay=old trainer.run_dir=./old trainer.overwrite=true
    trainer.overwrite: would delete the rollouts
SGLANG rollout.tensor_parallel_size=4 cluster.num_nodes=2 cluster.ray_address=auto
cluster.num_ranks_per_node=2
    rollout.tensor_parallel_size: must divide cluster.num_ranks_per_node=2
trainer.num_prompts_per_step=15 cluster.num_ranks_per_node=2
    trainer.num_prompts_per_step: multiple of 2 rollout engines
algorithm.old_logprobs=recompute algorithm.num_minibatches=3 cluster.num_ranks_per_node=8
    trainer.num_prompts_per_step: multiple of 24
data.task=null
    data.train_files: a built-in task
data.task=null data.train_files=[train.jsonl]
    eval.every_num_steps: empty
FILES data.train_files=[train.jsonl] data.prompt_key=null
    data.prompt_key: only the chats of preference pairs
FILES data.train_files=[train.jsonl] data.rejected_key=r data.answer_key=null
    data.answer_key: a column of its own
FILES data.train_files=[train.jsonl] mode=dpo
    data.rejected_key: mode=dpo learns from pairs
mode=dpo dpo.loss=sigmod
    dpo.loss: neither a built-in preference loss nor
mode=dpo dpo.loss_args.tau=1
    dpo.loss_args.tau: sigmoid has no such number
FILES data.train_files=[train.jsonl,train.jsonl]
    data.train_files: lists a file twice
FILES data.train_files=[train.jsonl,nowhere.jsonl]
    data.train_files: nowhere.jsonl does not exist
FILES data.train_files=[train.jsonl,empty.jsonl]
    data.train_files: the file is empty, 0 bytes
FILES data.train_files=[train.jsonl,train.txt]
    data.train_files: must end in one of .jsonl
FILES data.train_files=[train.jsonl,empty]
    data.train_files: is a folder without state.json
FILES data.train_files=[train.jsonl,splits]
    data.train_files: holds several splits: test, train
tracking.trackers=[prometheus] tracking.prometheus_address=localhost
    tracking.prometheus_address: must be HOST:PORT
checkpoint.function=copy
    checkpoint.function: neither a built-in function of check
tracking.function=keep
    tracking.function: neither a built-in function of metrics
eval.temperature=0.0001
    eval.temperature: 0 (greedy decoding) or at least 0.001
eval.sets={hot: {temperature: 0.0001}}
    eval.sets.hot.temperature: 0 (greedy decoding) or at least 0.001
eval.temperature=1.0 eval.pass_at_k=[1, 8]
    eval.pass_at_k: k=8 is above eval.num_responses_per_prompt=1
eval.sets={math: {num_responses_per_prompt: 4, pass_at_k: [3]}}
    eval.sets.math.pass_at_k: gives k equal responses
eval.sets={reward: {num_prompts: 5}}
    eval.sets.reward: metrics have this word
data.task=null data.train_files=[train.jsonl] eval.sets={a: {files: null}}
    eval.every_num_steps: (and eval.sets.a.files)
eval.sets={a: {files: [no.jsonl]}}
    eval.sets.a.files: does not exist
mode=eval data.task=null
    data.eval_files: nothing to evaluate on
checkpoint.best_metric=eval/pass_at_8
    checkpoint.best_metric: does not measure it
checkpoint.best_metric=eval/reward/mean eval.every_num_steps=0
    checkpoint.best_metric: does not measure it
mode=eval eval.checkpoint=nowhere
    eval.checkpoint: it is no run folder
LORA mode=eval eval.checkpoint=old/checkpoints/step-000000004
    lora.enabled: is merged into its weights
FILES data.sources={a: {files: [train.jsonl]}, b: {files: [train.jsonl], weight: 10000}}
    data.sources.a.weight: less than a thousandth
data.curriculum=easy_first
    data.curriculum: data.difficulty_key, which is null
algorithm.by_source={a: {advantage: rloo}}
    algorithm.by_source.a.advantage: data.sources has none, and not a
MIX algorithm=ppo algorithm.by_source={a: {advantage: rloo}}
    algorithm.by_source.a.advantage: a critic learns from the rows of all sources
MIX algorithm.by_source={a: {advantage: rloo, advantage_args: {lam: 1}}}
    algorithm.by_source.a.advantage_args.lam: rloo has
MIX algorithm.by_source={a: {advantage: distillation}}
    algorithm.teacher_path: that of a source, reads the log-probs of a teacher
data.curriculum=solve_rate mode=sft
    data.curriculum: mode=sft solves nothing
AHEAD data.curriculum=solve_rate
    data.curriculum: before earlier ones are solved
OPEN data.curriculum=solve_rate
    data.curriculum: before earlier ones are solved
cluster.num_nodes=2
    cluster.num_nodes: this machine alone
cluster.worker_setup_hook=install
    cluster.worker_setup_hook: package.module.function
cluster.worker_setup_hook=nopkg.a.b
    cluster.worker_setup_hook: no module nopkg
cluster.worker_setup_hook=json.nomod.b
    cluster.worker_setup_hook: module json.nomod
cluster.ray_address=somewhere
    cluster.ray_address: HOST:PORT
reward.function=exact_mach
    reward.function: neither
reward.function=math
    reward.function: math-verify
reward.function=nowhere.py:score
    reward.function: does not exist
reward.function=broken.py:score
    reward.function: not a Python file
reward.function=outside.py:score
    reward.function: 'return' outside function
reward.function=rewards.py:many
    reward.function: rows of data.task=sort_digits lack
reward.function=rewards.py:mixed
    reward.function: of one row, and 'answers', of all
reward.function=rewards.py:placed
    reward.function: positional-only parameter 'resp
reward.function=null
    reward.function: needs a function, or several
reward.functions={a: {function: exact_match}}
    reward.function: reward.functions gives a
reward.function=null reward.functions={a: {function: exact_mach}}
    reward.functions.a.function: neither
reward.function=null reward.functions={kl_charge: {function: exact_match}}
    reward.functions.kl_charge: another metric
reward.args={n: 1}
    reward.args.n: exact_match has no such number
reward.function=format
    reward.args.pattern: format needs it
reward.function=null reward.functions={a: {function: length, args: {tokens: 9, mode: budgit}}}
    reward.functions.a.args.mode: must be one of budget, target
reward.function=rewards.py:scaled reward.args={by: 3}
    reward.args.by: <= 2
reward.function=rewards.py:Score
    reward.function: is a class, not a function
reward.function=rewards.py:json
    reward.function: is a module, not a function
reward.function=rewards.txt:score
    reward.function: must end in .py
trainer.run_dir=model trainer.overwrite=true
    trainer.run_dir: not a run folder
trainer.run_dir=train.jsonl/run
    trainer.run_dir: no folder
LORA lora.target_modules=[]
    lora.target_modules: a layer to adapt
LORA lora.target_modules=[q_porj]
    lora.target_modules: did you mean 'q_proj'
LORA lora.rank=65
    lora.rank: at most 64: k_proj has 192 inputs and 64 outputs
LORA lora.init_from=nowhere
    lora.init_from: No such file
LORA lora.init_from=empty
    lora.init_from: empty/adapter_config.json
ADAPTER lora.rank=4
    lora.rank: was made with 2
ADAPTER lora.alpha=4
    lora.alpha: was made with 2
ADAPTER lora.use_rslora=true
    lora.use_rslora: was made with False
ADAPTER lora.target_modules=[q_proj]
    lora.target_modules: made with ['o_proj',
ADAPTER model.starter.num_layers=2
    lora.init_from: 4 tensors, and this one 8
ADAPTER lora.init_from=dora
    lora.init_from: use_dora=True is not supported
SEEING ADAPTER model.freeze_vision=false lora.sync=merged
    model.freeze_vision: lora.init_from=adapter has 0 tensors of the tower
SEEING ADAPTER lora.init_from=seen lora.sync=merged
    model.freeze_vision: lora.init_from=seen has 2 tensors of the tower
MEGATRON TP2
    cluster.num_ranks_per_node: multiple of 2: tensor 2 x pipeline 1
FOUR TP2 algorithm=ppo critic.num_ranks_per_node=1
    critic.num_ranks_per_node: ranks over all nodes, 1, must be a multiple of 2
MEGATRON NARROW cluster.num_ranks_per_node=3 megatron.tensor_parallel_size=3
trainer.num_prompts_per_step=12
    megatron.tensor_parallel_size: divide the model's 2 key-value heads, or be a multiple
MEGATRON NARROW cluster.num_ranks_per_node=6 megatron.tensor_parallel_size=6
trainer.num_prompts_per_step=12
    megatron.tensor_parallel_size: rows of queries, keys and values together
FOUR megatron.tensor_parallel_size=4
    megatron.tensor_parallel_size: divide the model's 6 query heads
FOUR NARROW megatron.tensor_parallel_size=4
    megatron.tensor_parallel_size: 510 columns inside the MLP
MEGATRON cluster.num_ranks_per_node=3 megatron.pipeline_parallel_size=3
    megatron.pipeline_parallel_size: divide the model's 4 layers, unless
FOUR PP2 megatron.num_layers_in_first_stage=1 megatron.num_virtual_stages=2
    megatron.num_layers_in_first_stage: by 2 virtual stages
FOUR megatron.pipeline_parallel_size=4 model.starter.num_layers=7
megatron.num_layers_in_last_stage=3
    megatron.num_layers_in_last_stage: the model's 7 layers must divide by the stages in between
MEGATRON megatron.num_layers_in_last_stage=2
    megatron.num_layers_in_last_stage: there is one stage
FOUR LORA model.starter.hidden_size=256 megatron.tensor_parallel_size=4
    megatron.tensor_parallel_size: a full one of the model's 2 key-value heads
FOUR PP2 megatron.num_virtual_stages=3
    megatron.num_virtual_stages: divide the 2 layers of a pipeline rank
FOUR megatron.num_virtual_stages=2
    megatron.num_virtual_stages: pipeline_parallel_size of at least 2
FOUR megatron.sequence_parallel=true
    megatron.sequence_parallel: tokens are shared
FOUR megatron.expert_parallel_size=2
    megatron.expert_parallel_size: no experts to share
FOUR megatron.expert_tensor_parallel_size=2
    megatron.expert_tensor_parallel_size: no experts to share
MOE GPUS megatron.expert_parallel_size=3 cluster.num_ranks_per_node=6
    megatron.expert_parallel_size: divide the model's 8 experts
MOE GPUS megatron.expert_tensor_parallel_size=4
    megatron.expert_tensor_parallel_size: 34 columns inside an expert
MOE GPUS megatron.tensor_parallel_size=4 megatron.sequence_parallel=true
    megatron.expert_parallel_size: each of 4 tensor-parallel ranks would train its own
MOE GPUS PP2 megatron.expert_parallel_size=8
    cluster.num_ranks_per_node: multiple of 16, for experts: expert 8 x expert tensor 1 x pipeline 2
MOE GPUS TP2
    megatron.sequence_parallel: tokens of its own
MOE cluster.num_ranks_per_node=2 megatron.expert_tensor_parallel_size=2
    megatron.expert_tensor_parallel_size: which gloo
FOUR megatron.layers=transformer_engine
    megatron.layers: runs on CUDA alone
MEGATRON GPUS megatron.layers=transformer_engine
    megatron.layers: TransformerEngine, and it is not installed
MEGATRON model.dtype=bfloat16
    model.dtype: keeps trained weights in float32
MEGATRON LORA algorithm=ppo model.dtype=bfloat16
    model.dtype: keeps trained weights in float32
MEGATRON GPUS megatron.layers=local megatron.attention=transformer_engine
    megatron.attention: it has other layers than megatron.layers=local
LORA FOLDER model.path=moe
    lora.target_modules: actor.engine=fsdp2 and rollout.engine=hf cannot adapt experts
MEGATRON LORA FOLDER model.path=moe
    lora.target_modules: rollout.engine=hf cannot adapt experts
MOE LORA GPUS megatron.expert_tensor_parallel_size=2
    megatron.expert_tensor_parallel_size: on one rank
MEGATRON SGLANG actor.replay_routing=true
    actor.replay_routing: no experts to route
MOE rollout=hf actor.replay_routing=true
    actor.replay_routing: does not return
MOE mode=sft actor.replay_routing=true
    actor.replay_routing: mode=sft learns from a file
MEGATRON megatron.transformer_args={moe_z_loss_coeff: 0.001}
    megatron.transformer_args.moe_z_loss_coeff: added up over micro-batches
MEGATRON megatron.transformer_args={sequence_parallel: true, bias_activation_fusion: true}
    megatron.transformer_args.sequence_parallel: megatron.sequence_parallel sets it
MEGATRON megatron.transformer_args={fp8: hybrid}
    megatron.transformer_args.fp8: it runs on CUDA alone
MEGATRON megatron.transformer_args={moe_token_dispatcher_type: allgather}
    megatron.transformer_args.moe_token_dispatcher_type: only alltoall and flex support
MEGATRON megatron.optimizer_args={clip_grad: 2.0}
    megatron.optimizer_args.clip_grad: actor.optimizer.max_grad_norm sets it
MEGATRON megatron.optimizer_args={use_precision_aware_optimizer: true}
    megatron.optimizer_args.use_precision_aware_optimizer: it runs on CUDA alone
MEGATRON GPUS megatron.optimizer_args={exp_avg_dtype: float16}
    megatron.optimizer_args.exp_avg_dtype: must be float32 or bfloat16
MEGATRON megatron.ddp_args={nccl_ub: true}
    megatron.ddp_args.nccl_ub: keep the old address
MEGATRON megatron.transformer_args={num_query_groups: 2}
    megatron.transformer_args.num_query_groups: config.json sets it
MEGATRON megatron.transformer_args={attention_dropout: 0.1}
    megatron.transformer_args.attention_dropout: not be the one that sampled
FOLDER SGLANG model.path=phi
    rollout.engine: model.path=phi is phi3
GEMMA MEGATRON
    actor.engine: model.path=gemma is gemma3_text
FOLDER model.path=capped
    model.path: softcapping=30.0 is not supported
FOLDER model.path=dynamic
    model.path: rope_type='dynamic' is not supported
FOLDER LORA model.path=phi
    lora.target_modules: matches no linear layer
MIXTRAL actor.replay_routing=true
    actor.replay_routing: no layer number
MIXTRAL LORA
    lora.target_modules: (known: k_proj, o_proj, q_proj, v_proj)
MEGATRON TP2 SGLANG cluster.num_ranks_per_node=2 rollout.dtype=bfloat16 model.path=shared
model.starter=null
    megatron.tensor_parallel_size: 35 columns inside the shared expert
FOLDER model.path=model eval.max_response_tokens=41
    eval.max_response_tokens: with data.max_prompt_tokens=24 it exceeds the model's context of 64
    tokens
FOLDER model.path=model eval.sets={a: {}} eval.max_response_tokens=70
    eval.sets.a.max_response_tokens: with data.max_prompt_tokens=24 it exceeds the model's context
    of 64 tokens
FOLDER model.path=model eval.max_response_tokens=50 data.max_prompt_tokens=64
    eval.max_response_tokens: with data.max_prompt_tokens=64 it exceeds
SGLANG FOLDER model.path=mistral eval.max_response_tokens=4090
    model.path: and rollout.max_response_tokens=24 and eval.max_response_tokens=4090
FOLDER model.path=long rollout.max_response_tokens=100
    model.path: its context is 64 tokens
FOUR TP2 trainer.num_prompts_per_step=4 rollout.num_responses_per_prompt=9
algorithm.num_minibatches=8 algorithm.old_logprobs=recompute
    trainer.num_prompts_per_step: 2 data-parallel ranks, of 2 ranks each
FOUR TP2 mode=sft trainer.num_prompts_per_step=63
    trainer.num_prompts_per_step: multiple of 2 data-parallel ranks
""")

UNREAD = _read("""
MASKS
    rollout.sampling_masks: leave all tokens
model.freeze_vision=false
    model.freeze_vision: has no vision tower
data.max_image_pixels=9999
    data.max_image_pixels: has no vision tower
MEGATRON actor.fsdp2.num_replicas=2
    actor.fsdp2.num_replicas: engine=megatron
MEGATRON actor.fsdp2.context_parallel_size=2
    actor.fsdp2.context_parallel_size: engine=megatron
TP2
    megatron.tensor_parallel_size: actor.engine=fsdp2
megatron.transformer_args={fp8: hybrid}
    megatron.transformer_args: actor.engine=fsdp2
MEGATRON megatron.load_balance_coefficient=0.01
    megatron.load_balance_coefficient: no experts to route
MEGATRON megatron.transformer_args={recompute_modules: [core_attn]}
    megatron.transformer_args.recompute_modules: actor.gradient_checkpointing=false
MEGATRON megatron.optimizer_args={optimizer_cpu_offload: true}
    megatron.optimizer_args.optimizer_cpu_offload: on the host already
data.train_files=[train.jsonl]
    data.train_files: makes its own rows
data.eval_files=[train.jsonl]
    data.eval_files: makes its own rows
FILES data.train_files=[train.jsonl] data.sources={a: {files: [train.jsonl]}}
    data.train_files: data.sources has the rows
data.sources={a: {files: [train.jsonl]}} eval.every_num_steps=0
    data.task: data.sources has the rows
mode=eval eval.checkpoint=old model.path=model model.starter=null
    model.path: that of eval.checkpoint
LORA mode=eval eval.checkpoint=old
    lora.enabled: merged into its weights
rollout.memory_fraction=0.5
    rollout.memory_fraction: rollout.engine=hf
rollout.transport=disk
    rollout.transport: rollout.engine=hf
rollout.engine_args={chunked_prefill_size: 512}
    rollout.engine_args: rollout.engine=hf
rollout.start_timeout_s=10.0
    rollout.start_timeout_s: rollout.engine=hf
rollout.request_timeout_s=10.0
    rollout.request_timeout_s: rollout.engine=hf
rollout.tensor_parallel_size=2
    rollout.tensor_parallel_size: one rank
SGLANG ELSEWHERE rollout.engine_args={chunked_prefill_size: 64}
    rollout.engine_args: the servers run already
tracking.prometheus_address=127.0.0.1:0
    tracking.prometheus_address: prometheus is not among tracking.trackers
checkpoint.every_num_steps=0 checkpoint.function=copy.py:copy
    checkpoint.function: no checkpoint is written
mode=eval rollout.dump=true
    rollout.dump: this is mode=eval
mode=eval rollout.replay=old
    rollout.replay: this is mode=eval
mode=eval trainer.profile_steps=[1]
    trainer.profile_steps: this is mode=eval
rollout.replay=old rollout.dump=true
    rollout.dump: a second copy
LORA lora.base=backup
    lora.base: rollout.sleep=false
LORA lora.base=resend lora.sync=merged rollout.sleep=true
    lora.base: lora.sync=merged
SERVERS SGLANG rollout.tensor_parallel_size=2 cluster.num_ranks_per_node=2
    rollout.tensor_parallel_size: devices_per_engine of a group
SGLANG COLOCATED cluster.num_ranks_per_node=2 rollout.tensor_parallel_size=2 serving.models={policy:
{groups: {main: {num_devices: 2}}}}
    rollout.tensor_parallel_size: devices_per_engine of a group
serving.weights=broadcast
    serving.weights: the ranks have the rollout engines
serving.router=sglang
    serving.router: the ranks have the rollout engines
serving.weight_deltas=true
    serving.weight_deltas: the ranks have the rollout engines
COLOCATED ASKED serving.weight_deltas=true serving.models.judge.groups={m: {num_devices: 1}}
    serving.weight_deltas: the ranks have the rollout engines
COLOCATED ASKED serving.weights=broadcast serving.models.judge.groups={m: {num_devices: 1}}
    serving.weights: the ranks have the rollout engines
SERVERS rollout.sleep=true
    rollout.sleep: servers have devices of their own
SERVERS serving.models.policy.max_context_tokens=9
    serving.models.policy.max_context_tokens: limit the policy
ASKED serving.num_devices_per_node=2 serving.models.judge.groups={m: {num_devices: 1}}
serving.models.judge.key_variable=NO_SUCH_KEY
    serving.models.judge.key_variable: the model has no urls
serving.models={policy: {groups: {a: {num_devices: 1, engine_args: {chunked_prefill_size: 64}}}}}
    serving.models.policy.groups.a.engine_args: rollout.engine=hf
agent.columns=[a]
    agent.columns: a single turn has no program that gets them
agent.command=[sh]
    agent.command: agent.loop=single_turn runs no program
agent.environment=Calculator
    agent.environment: agent.loop=single_turn plays none
agent.tools=[calculator]
    agent.tools: agent.loop=single_turn calls none
PLAYED agent.tools=[calculator]
    agent.tools: agent.loop=environment calls none
agent=proxy data=calculator agent.command=[sh] agent.tools=[calculator]
    agent.tools: agent.loop=proxy calls none
agent.search_folder=x
    agent.search_folder: agent.tools has no search
agent.sandbox=docker:x
    agent.sandbox: agent.tools has no python
reward.function=null reward.args={n: 1} reward.functions={a: {function: exact_match}}
    reward.args: each of reward.functions
algorithm.token_mask_args={a: 1}
    algorithm.token_mask_args: token_mask=null
algorithm.rollout_correction_args={a: 1}
    algorithm.rollout_correction_args: rollout_correction=null
algorithm.group_filter_args={a: 1}
    algorithm.group_filter_args: group_filter=null
algorithm.max_sampling_rounds=2
    algorithm.max_sampling_rounds: group_filter=null
algorithm.kl.gradient=k2
    algorithm.kl.gradient: kl.placement=none
algorithm.kl.target_nats=0.1
    algorithm.kl.target_nats: kl.placement=none
algorithm.kl.coefficient=0.1
    algorithm.kl.coefficient: kl.placement=none
FOLDER model.path=model algorithm=distillation algorithm.teacher_path=model
algorithm.soft_overlong_tokens=4
    algorithm.soft_overlong_tokens: reads no reward
algorithm.teacher_path=model
    algorithm.teacher_path: reads no teacher
algorithm.teacher_paths={a: model}
    algorithm.teacher_paths: reads no teacher
algorithm.teacher_prompt=a
    algorithm.teacher_prompt: reads no teacher
algorithm.divergence_beta=0
    algorithm.divergence_beta: divergence_coefficient=0
algorithm.divergence_top_k=8
    algorithm.divergence_top_k: divergence_coefficient=0
SERVERS serving.on_update=finish
    serving.on_update: leaves no response open
eval.in_background=true
    eval.in_background: nothing is sampled while
AHEAD eval.in_background=true eval.every_num_steps=0
    eval.in_background: nothing is evaluated
""")
BROKEN += [(typed, key, f"would be ignored, because ...{why}") for typed, key, why in UNREAD]

MISSING = _read("""
SGLANG
    sglang: rollout.engine=hf
MEGATRON
    megatron: actor.engine=fsdp2
MEGATRON
    megatron.core: actor.engine=fsdp2
TOOLS agent.tools=[search] agent.search_folder=empty
    bm25s: agent.tools=[] agent.search_folder=null
TOOLS agent.tools=["mcp:python server.py",calculator]
    mcp: agent.tools=[calculator]
tracking.trackers=[tensorboard,wandb]
    wandb: tracking.trackers=[tensorboard]
""")
"""What needs a package, its module, and the remedy where it is missing."""

LEGAL = _read("""
data.prompt_key=answer
    data.prompt_key: columns of a built-in task are held to nothing
MEGATRON LORA model.dtype=bfloat16
    model.dtype: what learns keeps float32, but a frozen base need not
MEGATRON megatron.transformer_args={bias_activation_fusion: true}
    megatron.transformer_args: what megatron-core alone knows passes through
SGLANG rollout.engine_args={chunked_prefill_size: 512, lora_backend: triton}
    rollout.engine_args: what SGLang alone knows passes through
SERVED rollout.dtype=float32 rollout.engine_args={attention_backend: triton}
    rollout.dtype: SGLang computes in float32 with attention in Triton
mode=sft rollout.num_responses_per_prompt=1
    rollout.num_responses_per_prompt: supervised learning needs no siblings
algorithm=ppo rollout.num_responses_per_prompt=1
    rollout.num_responses_per_prompt: a critic needs no siblings
algorithm=ppo actor.optimizer.num_warmup_steps=94
    actor.optimizer.num_warmup_steps: a warm-up ends before the run of 95 updates
mode=plan data.task=null
    data.train_files: a plan needs no rows
trainer.run_dir=old trainer.overwrite=true
    trainer.run_dir: an existing run may be replaced on request
trainer.run_dir=new
    trainer.run_dir: a folder with nothing but a lock is new
reward.function=reward.py:score
    reward.function: it takes all that there is
reward.function=rewards.py:few
    reward.function: of the responses alone
reward.function=rewards.py:later
    reward.function: asynchronous
reward.function=rewards.py:within
    reward.function: defined within a statement
reward.function=rewards.py:made
    reward.function: assigned
reward.function=rewards.py:decorated
    reward.function: decorated
tracking.trackers=[tensorboard,wandb,mlflow]
    tracking.trackers: packages that are installed
FOLDER model.path=blind algorithm=ppo
    algorithm.advantage: a critic of a model that could see is one of its language model alone
MEGATRON LORA FOLDER model.path=moe mode=sft
    lora.target_modules: experts are adapted where no engine samples
MEGATRON LORA FOLDER model.path=moe mode=dpo
    lora.target_modules: experts are adapted where no engine samples
ADAPTER
    lora.init_from: an adapter that fits
lora.target_modules=[nothing] lora.rank=4096 lora.init_from=nowhere
    lora.enabled: a section that is off is held to nothing
SGLANG LORA ASKED serving.num_devices_per_node=3 serving.models.judge.groups={a: {num_devices: 1,
worker_type: prefill}, b: {num_devices: 1, worker_type: decode}}
    lora.sync: own engines get an adapter, beside a judge whose requests are halved
""")
