"""``mode=doctor``: one page about the rows of a run, their tokens and their rewards.

And what ``mode=check`` reads with torch: rows of files, and the weights' headers.

Needs the tokenizer of the model; starts neither Ray nor a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from hybridrl.config.eval import EvalSet
from hybridrl.config.experiment import ExperimentConfig, with_value
from hybridrl.data.examination import (
    Examination,
    answer_lengths,
    both_answers,
    describe_lengths,
    find_contradictions,
    find_duplicates,
    find_overlap,
    find_overlong_answers,
    find_overlong_prompts,
    find_unlike_decoded,
)
from hybridrl.data.examples import lay_out
from hybridrl.data.prompts import TokenizedRow
from hybridrl.data.rows import own_columns
from hybridrl.data.starter_tokenizer import build_starter_tokenizer
from hybridrl.data.tokenizer import load_tokenizer
from hybridrl.errors import ConfigError, DataError, ModelError
from hybridrl.models.load import WeightFiles, build_empty_model, check_weights
from hybridrl.rewards.runner import RewardInputs
from hybridrl.rewards.scorer import RewardScorer
from hybridrl.run.rows import (
    eval_key,
    files_of,
    load_eval_rows,
    load_rows,
    load_train_rows,
    train_keys,
)

_MOST_EXAMPLES = 3
_MOST_TOKENS = 40
_USUAL_LIMIT = "rollout.max_response_tokens"


def examine(config: ExperimentConfig) -> tuple[str, bool]:
    """Look at all rows of a run; returns the page, and whether rows have to be corrected."""
    tokenizer = tokenizer_of(config)
    # In full: prompts beyond the limit are counted, not refused.
    unlimited = with_value(config, "data.max_prompt_tokens", 2**24)
    train = load_train_rows(unlimited, tokenizer).rows
    sets = config.eval.all_sets() if config.evaluates else []
    held_out = {one.name: load_eval_rows(unlimited, one, tokenizer) for one in sets}
    checks = list(_examine_rows(config, train, held_out, tokenizer))
    lines = [*_describe_rows(train, held_out, config), ""]
    for row in both_answers(train[:3]):
        lines += [*_describe_tokens(row, tokenizer, config), ""]
    prompt_limit, answer_limit = config.data.max_prompt_tokens, config.rollout.max_response_tokens
    prompt_lengths = [len(row.token_ids) for row in train]
    lines += describe_lengths("prompts", prompt_lengths, limit=prompt_limit)
    lengths = answer_lengths(both_answers(train), tokenizer)
    lines += describe_lengths("answers", lengths, limit=answer_limit)
    lines.append("")
    for check in checks:
        mark = "!" if check.is_bad else ("-" if check.examples else " ")
        lines.append(f"{mark} {check.fault}: {len(check.examples)} of {check.num_rows}")
        lines += [f"    {example}" for example in check.examples[:_MOST_EXAMPLES]]
        if (num_more := len(check.examples) - _MOST_EXAMPLES) > 0:
            lines.append(f"    and {num_more} more")
    is_bad = any(check.is_bad for check in checks)
    lines.append("" if not is_bad else "\nproblems: correct the rows marked with !")
    return "\n".join(lines).rstrip() + "\n", is_bad


def _examine_rows(
    config: ExperimentConfig,
    train: Sequence[TokenizedRow],
    held_out: Mapping[str, Sequence[TokenizedRow]],
    tokenizer: PreTrainedTokenizerBase,
) -> Iterator[Examination]:
    rows = [*train, *(row for of_set in held_out.values() for row in of_set)]
    limits = config.response_limits
    rows_of: dict[str, list[TokenizedRow]] = {key: [] for key in limits}
    rows_of[_USUAL_LIMIT] += both_answers(train)
    for one in config.eval.all_sets() if held_out else ():
        key = f"{one.key}.max_response_tokens"
        rows_of[key if key in limits else _USUAL_LIMIT] += both_answers(held_out[one.name])
    is_error = config.data.overlong_prompts == "error"
    yield find_overlong_prompts(
        both_answers(rows), limit=config.data.max_prompt_tokens, is_problem=is_error
    )
    for key, limit in limits.items():
        yield find_overlong_answers(rows_of[key], tokenizer, key=key, limit=limit)
    yield find_unlike_decoded(both_answers(rows), tokenizer)
    if config.data.rejected_key is not None:  # a prompt may have several pairs; none is scored
        yield find_contradictions(train)
        yield from find_overlap(train, held_out)
        return
    yield from find_duplicates(train)
    yield from find_overlap(train, held_out)
    yield from _examine_rewards(config, rows, tokenizer)


def _examine_rewards(
    config: ExperimentConfig, rows: Sequence[TokenizedRow], tokenizer: PreTrainedTokenizerBase
) -> Iterator[Examination]:
    """Score the reference answers, and empty responses, of rows spread evenly."""
    if config.reward.model_paths or config.reward.judges:  # in processes of a run alone
        return
    step = max(1, -(-len(rows) // 2000))
    scored = rows[::step]
    name = f"reward.function={config.reward.function}"
    right = config.eval.correct_reward
    answers = [row.row.answer for row in scored]
    inputs = RewardInputs(
        responses=answers,
        answers=answers,
        prompts=[row.prompt_text for row in scored],
        sources=[row.row.source for row in scored],
        lengths=[len(tokenizer.encode(answer, add_special_tokens=False)) for answer in answers],
        own=own_columns([row.row for row in scored]),
    )
    nothing = replace(inputs, responses=[""] * len(scored), lengths=[0] * len(scored))
    with RewardScorer(config.reward) as scorer:
        gold, empty = (scorer.score(each).rewards_B.tolist() for each in (inputs, nothing))
    wrong_gold = [
        f"{row.row.origin}: {row.row.answer!r} scores {reward:g}"
        for row, reward in zip(scored, gold, strict=True)
        if reward < right
    ]
    paid_empty = [
        f"{row.row.origin}: scores {reward:g}"
        for row, reward in zip(scored, empty, strict=True)
        if reward != 0
    ]
    fault = f"reference answers that {name} scores below eval.correct_reward={right:g}"
    yield Examination(fault, len(scored), wrong_gold)
    yield Examination(f"empty responses that {name} does not score 0", len(scored), paid_empty)


def _describe_rows(
    train: Sequence[TokenizedRow],
    held_out: Mapping[str, Sequence[TokenizedRow]],
    config: ExperimentConfig,
) -> Iterator[str]:
    yield f"tokenizer    {config.model.path or 'of the starter model'}"
    template = "the chat template" if config.data.use_chat_template else "as they stand"
    yield f"prompts      {template}"
    sources: dict[str, int] = {}
    for row in train:
        sources[row.row.source] = sources.get(row.row.source, 0) + 1
    named = ", ".join(f"{name} {count}" for name, count in sources.items())
    yield f"learned from {len(train)} rows ({named})"
    for name, rows in held_out.items():
        yield f"held out     {len(rows)} rows{f' ({name})' if name else ''}"
    if config.reward.model_paths or config.reward.judges:
        yield "rewards      not examined: reward models and judges score in a run alone"


def _describe_tokens(
    row: TokenizedRow, tokenizer: PreTrainedTokenizerBase, config: ExperimentConfig
) -> Iterator[str]:
    """Yield the tokens of a row as supervised fine-tuning sees them, with and without loss."""
    learns_all_turns = config.sft.turns == "all"
    [(token_ids, mask)] = lay_out([row], tokenizer, learns_all_turns=learns_all_turns)
    num_with_loss = int(mask.sum())
    yield f"{row.row.origin} ({row.row.source}), {len(mask)} tokens, {num_with_loss} with loss"
    changes = (torch.nonzero(mask[1:] != mask[:-1])[:, 0] + 1).tolist()
    for begin, end in zip([0, *changes], [*changes, len(mask)], strict=True):
        texts = [repr(tokenizer.decode([token]))[1:-1] for token in token_ids[begin:end].tolist()]
        if len(texts) > _MOST_TOKENS:
            half = _MOST_TOKENS // 2
            texts = [*texts[:half], f"... {len(texts) - 2 * half} more ...", *texts[-half:]]
        yield f"  {'loss   ' if mask[begin] else 'no loss'} {'|'.join(texts)}"


def tokenizer_of(config: ExperimentConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the model, which need not exist if the run would make it."""
    if config.model.path is None:
        starter = config.model.starter
        return build_starter_tokenizer(sees=starter is not None and starter.num_vision_layers > 0)
    folder = Path(config.model.path)
    return load_tokenizer(folder, needs_chat_template=config.data.use_chat_template)


def find_bad_rows(
    config: ExperimentConfig, *, refused: Sequence[ConfigError] = ()
) -> list[ConfigError]:
    """Read all rows of files as a run would; of a large set the run then finds its tokens.

    Returns an error for each key whose files are unusable, or hold bad rows or prompts that are too
    long; it names file and line. If ``refused`` has violations of the configuration, rows are not
    tokenized: model or limits may be wrong.
    """
    tokenizer = None if refused else tokenizer_of(config)
    sets: dict[str, EvalSet | None] = dict.fromkeys(train_keys(config))
    for evaluated in config.eval.all_sets() if config.evaluates else []:
        sets[eval_key(evaluated)] = evaluated
    bad_rows = []
    for key, settings in sets.items():
        if any(violation.key == key for violation in refused):  # no such files
            continue
        if not config.files_by_key[key]:  # a built-in task makes the rows
            continue
        try:
            if tokenizer is None:
                deque(files_of(config, key).parsed(), maxlen=0)
            elif settings is None:
                load_rows(config, key, tokenizer)
            else:
                load_eval_rows(config, settings, tokenizer)
        except DataError as error:
            fix = "correct the files, or the key that the message names"
            bad_rows.append(ConfigError(key, list(config.files_by_key[key]), str(error), fix))
    return bad_rows


def find_bad_weights(folder: Path) -> list[ConfigError]:
    """Compare names, shapes and types in the headers of the files; reads no values."""
    try:
        check_weights(build_empty_model(folder, dtype=torch.float32), WeightFiles(folder))
    except ModelError as error:
        return [ConfigError("model.path", str(folder), str(error), "download the folder again")]
    return []
