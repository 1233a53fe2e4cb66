"""Load a tokenizer, reject one that does not fit the run, and decode responses."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl.batch import RolloutBatch, last_turns, response_lengths
from hybridrl.errors import ModelError
from hybridrl.models.model_folder import (
    CONFIG,
    missing_tokenizer_of,
    read_settings,
    read_stop_tokens,
)


def load_tokenizer(folder: Path, *, needs_chat_template: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder. It needs no pad token: hybridrl never pads.

    Raises:
        ModelError: no folder, no readable tokenizer in it, no end-of-sequence token, or no chat
            template though one is needed.
    """
    # Checked here, since transformers takes a path that does not exist for the name of a download.
    if not folder.is_dir():
        raise ModelError(f"model folder {folder} does not exist; set model.path to one that does")
    if flaw := missing_tokenizer_of(folder):
        raise ModelError(f"model folder {folder}: {flaw}; download it again")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model folder {folder} has no usable tokenizer ({error}); put tokenizer.json and "
            "tokenizer_config.json into it"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer in {folder} has no end-of-sequence token, so no response could end; "
            "set eos_token in its tokenizer_config.json"
        )
    if needs_chat_template and not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer in {folder} has no chat template; set data.use_chat_template=false, or "
            "add chat_template.jinja to the folder"
        )
    return tokenizer


def load_stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's and those of generation_config.json.

    Raises:
        ModelError: generation_config.json is not a JSON object, or one of them is not a token of
            the model.
    """
    end = tokenizer.eos_token_id
    vocab_size = read_settings(folder).get("vocab_size") if (folder / CONFIG).exists() else None
    if vocab_size is not None and not 0 <= end < vocab_size:
        raise ModelError(
            f"the tokenizer in {folder} ends responses with token {end}, and the model knows 0 to "
            f"{vocab_size - 1} (vocab_size={vocab_size}): no response could end; put the tokenizer "
            "that belongs to the model into the folder"
        )
    return tuple(sorted({end, *read_stop_tokens(folder)}))


def decode_responses(rollouts: RolloutBatch, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each row's last sampled turn, without special tokens; B strings.

    Of a single turn that is the response; of a conversation the answer.
    Token ids past the tokenizer's vocabulary (rows of a padded embedding) are left out.
    """
    mask_BL = last_turns(rollouts.response_mask_BL)
    tokens_T = rollouts.token_ids_BL.values()[mask_BL.values()]
    rows = torch.split(tokens_T, response_lengths(mask_BL).tolist())
    texts: list[str] = tokenizer.batch_decode(
        [row.tolist() for row in rows], skip_special_tokens=True
    )
    return texts
