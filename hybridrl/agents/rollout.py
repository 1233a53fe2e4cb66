"""Conversations of a rollout phase: one agent for each response, many at a time."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_args

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.conversation import Agent, Conversation, Prompt, Setting, hold
from hybridrl.agents.environments import Environments, PlaysEnvironment, load_environment
from hybridrl.agents.templates import TurnTemplate
from hybridrl.agents.tool_calls import ToolCall, load_format
from hybridrl.agents.tool_process import ToolLimits
from hybridrl.agents.tools import Schema, Toolbox, load_tools, with_index
from hybridrl.agents.trajectory import Ended, Trajectory
from hybridrl.batch import PromptBatch, images_of
from hybridrl.config.agent import ENVIRONMENT, PROXY, AgentConfig
from hybridrl.data.prompts import decode_row
from hybridrl.errors import AgentError, shown
from hybridrl.images import ImageSettings
from hybridrl.metrics import Mean, Metrics, Sum, merge
from hybridrl.processes.child import last_line, load_module
from hybridrl.processes.guard import usual_num_processes
from hybridrl.sampler import Program, RequestParams, Sample, Sampler, SamplingParams

if TYPE_CHECKING:
    from hybridrl.agents.proxy import Proxy

log = logging.getLogger(__name__)

_MOST_CAUSES = 3


class ToolCalls:
    """Lets the model call tools, several at a time, until a turn has no call: the answer."""

    appended_roles = ("tool",)

    async def run(self, conversation: Conversation) -> None:
        """Answer each turn's calls with their results."""
        while calls := conversation.read_calls(await conversation.sample()):
            results = await asyncio.gather(*map(conversation.call, calls))
            conversation.append([result.message for result in results])


def tool_schemas(config: AgentConfig) -> tuple[Schema, ...]:
    """Return the schemas that chat templates show; none without an agent."""
    if config.is_single_turn:
        return ()
    return tuple(tool.schema for tool in load_tools(config.tools, config.sandbox))


def require_usable_agent(
    config: AgentConfig, tokenizer: PreTrainedTokenizerBase, *, stop_token_ids: Sequence[int]
) -> None:
    """Raise AgentError if the agent cannot be loaded, or the chat template carry its messages."""
    if config.is_single_turn:
        return
    template = TurnTemplate(tokenizer, stop_token_ids=stop_token_ids)
    if config.loop == PROXY:
        roles: Sequence[str] = ("tool", "user")  # a program may append what it likes
    elif config.loop == ENVIRONMENT:
        roles = load_environment(str(config.environment)).appended_roles
    else:
        roles = load_agent(config.loop)().appended_roles
    tool_format = load_format(config.tool_format, tokenizer)
    template.require_increments(history=config.history, roles=roles)
    if not config.tools or "tool" not in roles:
        return
    written = template.written_call()
    calls = tool_format.read(written, ())
    if written and not any(isinstance(call, ToolCall) for call in calls):
        # Each turn would be an answer.
        log.warning(
            "agent.tool_format=%s reads no call in what the chat template writes, %s; set the "
            "format of this call: docs/agents.md has them",
            *(config.tool_format, shown(written)),
        )


def load_agent(spelled: str) -> Callable[[], Agent]:
    """Import the class of an agent; AgentError if that fails, or it has no coroutine ``run``."""
    if spelled == "tool_calls":
        return ToolCalls
    file, _, name = spelled.rpartition(":")
    try:
        agent: Any = vars(load_module(file))[name]
        roles = list(agent.appended_roles)
    except (Exception, SystemExit) as error:  # any user code
        raise AgentError(
            f"agent.loop={spelled} cannot be loaded: {last_line(error)}; correct the file"
        ) from error
    if not asyncio.iscoroutinefunction(agent.run) or not {"tool", "user"}.issuperset(roles):
        raise AgentError(
            f"agent.loop={spelled} is no agent; give it `appended_roles`, of tool and user, and "
            "`async def run(self, conversation)`"
        )
    loaded: Callable[[], Agent] = agent
    return loaded


class AgentRollout:
    """The agent, tools and template of a rank; close it at the end."""

    def __init__(
        self,
        config: AgentConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int],
        max_prompt_tokens: int,
        hidden_variables: Collection[str] = (),
        images: ImageSettings | None = None,
    ) -> None:
        """Load the agent and its tools; AgentError as of ``load_agent`` and ``load_tools``.

        ``hidden_variables`` of the environment are not passed to programs (``proxy``). ``images``
        says how the model cuts images; None: it sees none.
        """
        self._config = config
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        tools = with_index(load_tools(config.tools, config.sandbox), config.search_folder)
        self._template = TurnTemplate(
            tokenizer,
            stop_token_ids=stop_token_ids,
            tools=[tool.schema for tool in tools],
            images=images,
        )
        self._tool_format = load_format(config.tool_format, tokenizer)
        limits = ToolLimits(
            timeout_s=config.tool_timeout_s, max_chars=config.max_result_chars, images=images
        )
        self._hidden_variables = hidden_variables
        self._num_refused = 0
        self._environments: Environments | None = None
        self._agent: Callable[[], Agent]
        if config.loop == ENVIRONMENT:
            kind = load_environment(str(config.environment))
            self._environments = Environments(kind, limits=limits)
            self._agent = partial(PlaysEnvironment, self._environments)
        elif config.loop != PROXY:
            self._agent = load_agent(config.loop)
        self._toolbox = Toolbox(tools, limits=limits, num_processes=usual_num_processes())
        self._metrics: Metrics = {}

    def program(self, prompts: PromptBatch, sampling: SamplingParams) -> Program[list[Sample]]:
        """Return the program that holds G conversations from each of P prompts.

        It returns P * G samples in prompt order, those to the same prompt adjacent.
        """
        size = sampling.num_responses_per_prompt
        if prompts.row_PN is None:
            raise AgentError("an agent needs the rows of its prompts; build the batch with them")
        rows = map(decode_row, prompts.row_PN.unbind())
        tokens, seeds = prompts.token_ids_PL.unbind(), prompts.seed_P.tolist()
        columns = zip(rows, tokens, seeds, images_of(prompts), strict=True)
        beginnings = [
            Prompt(
                row=row,
                token_ids=token_ids,
                seed=seed,
                response_index=g,
                number=index * size + g,
                images=images,
            )
            for index, (row, token_ids, seed, images) in enumerate(columns)
            for g in range(size)
        ]

        index_P = prompts.prompt_index_P.tolist()

        def report(prompt: Prompt, sample: Sample) -> None:
            if sampling.reporter is not None:
                index = index_P[prompt.number // size]
                sampling.reporter.report(index, prompt.response_index, sample)

        params = sampling.request_params()
        return partial(self._hold_all, beginnings, params, report)

    def take_metrics(self) -> Metrics:
        """Return the metrics of the conversations since the last time, and reset them."""
        metrics, self._metrics = self._metrics, {}
        if self._config.loop == PROXY:
            metrics["agent/refused_requests"] = Sum(self._num_refused)
            self._num_refused = 0
        return metrics

    def close(self) -> None:
        """End the processes of tools and environments."""
        self._toolbox.close()
        if self._environments is not None:
            self._environments.close()

    @asynccontextmanager
    async def _opened(self, setting: Setting) -> AsyncIterator[Callable[[], Agent]]:
        """Make agents. Programs have a server for each call, which may overlap with others."""
        if self._config.loop != PROXY:
            yield self._agent
            return
        # By name: aiohttp takes 0.3 s, which runs without agent programs save.
        proxy: Proxy = import_module("hybridrl.agents.proxy").Proxy(
            self._config, hidden_variables=self._hidden_variables
        )
        try:
            async with proxy.open(setting):
                yield lambda: proxy
        finally:
            self._num_refused += proxy.num_refused

    async def _hold_all(
        self,
        prompts: Sequence[Prompt],
        params: RequestParams,
        report: Callable[[Prompt, Sample], None],
        sampler: Sampler,
    ) -> list[Sample]:
        free = asyncio.Semaphore(self._config.num_conversations)
        setting = Setting(
            sampler=sampler,
            params=params,
            max_prompt_tokens=self._max_prompt_tokens,
            tokenizer=self._tokenizer,
            template=self._template,
            history=self._config.history,
            toolbox=self._toolbox,
            tool_format=self._tool_format,
            max_turns=self._config.max_turns,
            timeout_s=self._config.timeout_s,
        )

        async def hold_one(prompt: Prompt, agent: Callable[[], Agent]) -> tuple[Trajectory, Sample]:
            async with free:
                trajectory = await hold(agent(), prompt, setting)
            sample = trajectory.to_sample()
            report(prompt, sample)
            return trajectory, sample

        async with self._opened(setting) as agent:
            tasks = [asyncio.ensure_future(hold_one(prompt, agent)) for prompt in prompts]
            try:
                held = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
        trajectories = [trajectory for trajectory, _ in held]
        self._metrics = merge([self._metrics, describe(trajectories)])
        _warn_of_failures(trajectories)
        return [sample for _, sample in held]


def _warn_of_failures(trajectories: Sequence[Trajectory]) -> None:
    """Say why conversations broke off, each cause once, and that no call of a tool succeeded."""
    size = len(trajectories)
    causes = Counter(trajectory.failure for trajectory in trajectories if trajectory.failure)
    for cause, count in causes.most_common(_MOST_CAUSES):
        log.warning("%d of %d conversations broke off: %s", count, size, cause)
    num_calls = sum(trajectory.num_tool_calls for trajectory in trajectories)
    if num_calls and num_calls == sum(trajectory.num_tool_errors for trajectory in trajectories):
        messages = (m for each in trajectories for turn in each.turns for m in turn.messages)
        answers = [message.content for message in messages if message.role == "tool"]
        shown_answer = shown(answers[0]) if answers else "no message"
        log.warning("all %d calls of tools failed; the first answer: %s", num_calls, shown_answer)


def describe(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return the metrics of conversations."""
    num_rows, num_calls = len(trajectories), sum(t.num_tool_calls for t in trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    num_sampled = sum(len(turn.token_ids) for turn in turns if turn.logprobs is not None)
    num_appended = sum(len(turn.token_ids) for turn in turns if turn.logprobs is None)
    metrics: Metrics = {
        "agent/turns/mean": Mean(sum(t.num_sampled_turns for t in trajectories), num_rows),
        "agent/sampled_tokens/mean": Mean(num_sampled, num_rows),
        "agent/appended_tokens/mean": Mean(num_appended, num_rows),
        "agent/sequences/mean": Mean(sum(len(t.sequences) for t in trajectories), num_rows),
        "agent/tool_calls/mean": Mean(num_calls, num_rows),
    }
    if num_calls:
        num_errors = sum(t.num_tool_errors for t in trajectories)
        metrics["agent/tool_error_fraction"] = Mean(num_errors, num_calls)
    if seconds := sum(t.tool_seconds for t in trajectories):  # none of tools of agent programs
        metrics["agent/tool_s/mean"] = Mean(seconds, num_calls)
    for cause in get_args(Ended):
        if cause != "answer":
            count = sum(trajectory.ended == cause for trajectory in trajectories)
            metrics[f"agent/ended_by_{cause}_fraction"] = Mean(count, num_rows)
    return metrics
