"""Rewards of rollouts: token ids become text, and the scorer sees it with the row's answer.

Responses that end while others are sampled are scored early: the ranks report each as it ends, and
threads of the driver hand it to the reward processes. When all rollouts are there,
`EarlyRewards.take` has the rewards of the rows that are exactly the reported ones, and the scorer
scores the others. So a lost report costs time alone.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from threading import Lock, Thread
from typing import Any, Self

import ray
from ray.exceptions import RayError
from ray.util.queue import Queue
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from transformers import PreTrainedTokenizerBase

from hybridrl.agents.trajectory import failure_of, messages_of
from hybridrl.batch import RolloutBatch, response_lengths, row_sums
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import own_columns
from hybridrl.data.source import PromptStep
from hybridrl.data.tokenizer import decode_responses
from hybridrl.diagnostics import trace
from hybridrl.errors import AgentError
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import EarlyRow, RewardScorer, Scores
from hybridrl.sampler import Sample, SamplingParams
from hybridrl.trainer.reward_models import JudgeAnswers, ModelScores
from hybridrl.workers.rollout.assemble import assemble_rollouts

log = logging.getLogger(__name__)

_END_WAIT_S = 10.0


def reward_inputs(
    rollouts: RolloutBatch, rows: Sequence[TokenizedRow], tokenizer: PreTrainedTokenizerBase
) -> RewardInputs:
    """Return the inputs of reward functions for B rollouts; ``rows`` are those of their prompts."""
    conversations = (
        [messages_of(rollouts, row, tokenizer) for row in range(len(rollouts))]
        if rollouts.turns_BN is not None
        else []
    )
    return RewardInputs(
        responses=decode_responses(rollouts, tokenizer),
        answers=[row.row.answer for row in rows],
        prompts=[row.prompt_text for row in rows],
        sources=[row.row.source for row in rows],
        lengths=response_lengths(rollouts.response_mask_BL).tolist(),
        conversations=conversations,
        own=own_columns([row.row for row in rows]),
    )


class ChannelLost(Exception):
    """The process that holds the messages is gone."""


class SideChannel:
    """The end of the driver; close it at the end."""

    def __init__(self) -> None:
        """Start the process that holds the messages, on the machine of the driver."""
        node_id = ray.get_runtime_context().get_node_id()
        placed = NodeAffinitySchedulingStrategy(node_id, soft=False)
        self.queue: Any = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": placed}).actor

    def receive(self) -> Any:  # noqa: ANN401 - the sender's object
        """Wait for the next message; ``ChannelLost`` if there will be none."""
        try:
            return pickle.loads(ray.get(self.queue.get.remote()))
        except (RayError, RuntimeError) as error:
            raise ChannelLost(str(error).partition("\n")[0]) from error

    def close(self) -> None:
        """End the process. Twice is a no-op."""
        with suppress(RayError, RuntimeError):  # Ray is gone, and the process with it
            ray.kill(self.queue)


def _send(queue: Any, message: object) -> None:  # noqa: ANN401 - the handle of an actor
    """Send and do not wait. The queue never opens the pickle, so it needs no torch."""
    queue.put_nowait.remote(pickle.dumps(message))


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """The report of one response."""

    call: int
    prompt_index: int
    response_index: int
    sample: Sample


@dataclass(frozen=True, slots=True)
class DriverReporter:
    """Reports the responses of one call, from a rank; see ``SamplingParams.reporter``."""

    queue: Any  # handle of the queue's actor
    call: int

    def report(self, prompt_index: int, response_index: int, sample: Sample) -> None:
        """Send a response, and do not wait."""
        sent = replace(
            sample,
            token_ids=sample.token_ids.clone(),  # a view would carry all of its storage
            logprobs=sample.logprobs.clone(),
            routed_experts_LJK=None,
            teacher_JL=None,
        )
        _send(self.queue, EndedResponse(self.call, prompt_index, response_index, sent))


Key = tuple[int, int]
"""Position of the prompt in its step, and index of the response among those to the prompt."""


@dataclass(slots=True)
class _Call:
    """The responses of one call of ``generate``."""

    number: int
    task: PromptStep
    waiting: deque[tuple[Key, Sample]] = field(default_factory=deque)
    seen: set[Key] = field(default_factory=set)
    scored: dict[Key, tuple[RewardInputs, EarlyRow]] = field(default_factory=dict)
    is_over: bool = False
    work: list[Future[None]] = field(default_factory=list)
    num_hangs: int = 0


class EarlyRewards:
    """Scores responses while others are sampled; close it, or use it in a ``with``."""

    def __init__(self, scorer: RewardScorer, tokenizer: PreTrainedTokenizerBase) -> None:
        """Start the channel; without a function that can score early there is nothing to do."""
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._numbers = count(1)
        self._lock = Lock()
        self._call: _Call | None = None
        self._threads = ThreadPoolExecutor(scorer.num_processes, "early reward")
        self._channel = SideChannel() if scorer.early_functions else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def scoring(self, task: PromptStep, sampling: SamplingParams) -> Iterator[SamplingParams]:
        """Score responses to ``task`` in the block; they are to be sampled with what it yields."""
        self._call = None
        channel = self._channel
        if channel is None:
            yield sampling
            return
        call = _Call(next(self._numbers), task)
        receiver = Thread(
            target=self._receive, args=(channel, call), name="early reward receiver", daemon=True
        )
        receiver.start()
        try:
            yield replace(sampling, reporter=DriverReporter(channel.queue, call.number))
            self._call = call
        finally:
            call.is_over = True
            with suppress(Exception):  # Ray is gone: the receiver has ended
                _send(channel.queue, None)
            receiver.join(_END_WAIT_S)
            if receiver.is_alive():
                self._lose(f"the queue of ended responses was not read within {_END_WAIT_S:g} s")
            if self._call is None:
                call.waiting.clear()

    def take(self, inputs: RewardInputs) -> dict[int, EarlyRow] | None:
        """Return the rewards of the rows that were scored early, and forget them.

        ``inputs`` are B rows to the prompts of the last ``scoring``, those to one prompt adjacent.
        None if no function can score early.
        """
        call, self._call = self._call, None
        if call is None:
            return {} if self._scorer.early_functions else None
        wait(call.work)
        num_responses = len(inputs) // len(call.task.rows)
        scored = {p * num_responses + g: each for (p, g), each in call.scored.items()}
        return {
            row: early
            for row, (seen, early) in scored.items()
            if row < len(inputs) and seen == inputs.take([row])
        }

    def close(self) -> None:
        """End the channel; rows that still wait are not scored. Twice is a no-op."""
        # Not with cancel_futures: a `wait` for what that cancels never ends.
        self._threads.shutdown(wait=False)
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _lose(self, reason: str) -> None:
        if self._channel is not None:
            log.warning("from now on, responses are scored after all are sampled: %s", reason)
            self.close()

    def _receive(self, channel: SideChannel, call: _Call) -> None:
        """Take in the reports of a call until its end."""
        position_of = {
            index: p for p, index in enumerate(call.task.prompts.prompt_index_P.tolist())
        }
        try:
            while (ended := channel.receive()) is not None:
                key = (position_of.get(ended.prompt_index, -1), ended.response_index)
                # Others: late ones of an earlier call, and copies that filled up a batch.
                if ended.call == call.number and key[0] >= 0 and key not in call.seen:
                    call.seen.add(key)
                    call.waiting.append((key, ended.sample))
                    call.work.append(self._threads.submit(self._score_some, call))
        except ChannelLost as error:
            self._lose(str(error))
        except RuntimeError:  # closed meanwhile: the threads take no more work
            return

    def _score_some(self, call: _Call) -> None:
        """Score this thread's share of the rows that wait."""
        with self._lock:
            num_rows = -(-len(call.waiting) // self._scorer.num_processes)
            taken = [call.waiting.popleft() for _ in range(num_rows)]
        is_closed = self._channel is None
        if not taken or is_closed or call.num_hangs >= self._scorer.num_processes:
            return
        positions = [p for (p, _), _ in taken]
        try:
            rollouts = assemble_rollouts(
                call.task.prompts[positions], [sample for _, sample in taken], policy_version=0
            )
            rows = [call.task.rows[p] for p in positions]
            inputs = reward_inputs(rollouts, rows, self._tokenizer)
            with trace.span("early reward", rows=len(taken)):
                rewards, num_hangs = self._scorer.score_early(inputs)
        except Exception as error:
            log.debug("rows are scored afterwards: %s: %s", type(error).__name__, error)
            return
        with self._lock:
            call.num_hangs += num_hangs
            for row, (key, _) in enumerate(taken):
                early = EarlyRow(rewards[row], is_in_time=not call.is_over)
                call.scored[key] = inputs.take([row]), early


@dataclass(frozen=True, slots=True)
class TextReward:
    """Decodes responses and scores their text."""

    scorer: RewardScorer
    tokenizer: PreTrainedTokenizerBase
    models: ModelScores | None = None  # has reward models score, if there are any
    early: EarlyRewards | None = None  # scores responses while others are sampled
    judges: JudgeAnswers | None = None  # asks judges, if there are any
    # of conversations that broke off; see `agent.max_failed_fraction`
    max_failed_fraction: float = 1.0

    def while_sampling(
        self, task: PromptStep, sampling: SamplingParams
    ) -> AbstractContextManager[SamplingParams]:
        """Score responses to ``task`` in the block; they are to be sampled with what it gives."""
        return nullcontext(sampling) if self.early is None else self.early.scoring(task, sampling)

    def __call__(self, rollouts: RolloutBatch, task: PromptStep) -> Scores:
        """Score B rows, the responses to a prompt adjacent.

        Raises:
            AgentError: more conversations broke off than may.
            RewardError: see `RewardScorer.score`.
        """
        if rollouts.is_failed_B is not None:
            num_failed, limit = int(rollouts.is_failed_B.sum()), self.max_failed_fraction
            if num_failed > limit * len(rollouts):
                raise AgentError(
                    f"{num_failed} of {len(rollouts)} conversations broke off, the last with: "
                    f"{failure_of(rollouts)}; correct the tool, environment or program, or raise "
                    f"agent.max_failed_fraction={limit:g}"
                )
        num_responses = len(rollouts) // len(task.rows)
        rows = [row for row in task.rows for _ in range(num_responses)]
        inputs = reward_inputs(rollouts, rows, self.tokenizer)
        by_models = {} if self.models is None else self.models(rows, inputs.responses)
        early = None if self.early is None else self.early.take(inputs)
        by_token_BL = rollouts.agent_rewards_BL
        scores = self.scorer.score(
            inputs,
            model_scores=by_models,
            judge_answers={} if self.judges is None else self.judges(inputs),
            agent_rewards=[0.0] * len(rows)
            if by_token_BL is None
            else row_sums(by_token_BL).tolist(),
            early=early,
        )
        if rollouts.is_failed_B is None:
            return scores
        is_left_out_B = rollouts.is_failed_B
        if scores.is_left_out_B is not None:
            is_left_out_B = is_left_out_B | scores.is_left_out_B
        return replace(scores, is_left_out_B=is_left_out_B)
