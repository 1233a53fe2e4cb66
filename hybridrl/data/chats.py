"""Answers that stand at the end of chats, apart from the messages before them."""

from __future__ import annotations

from collections.abc import Mapping

from hybridrl.data.records import Malformed
from hybridrl.errors import shown


def split_answer(
    chat: object, name: str, *, why: str, needs_prompt: bool
) -> tuple[list[object], object]:
    """Return the messages before the last one, and the content of the last one.

    Args:
        chat: as its column has it.
        why: the column must be a chat.
        needs_prompt: whether there must be messages before the last one.

    Raises:
        Malformed: it is none, or the assistant does not have the last word.
    """
    last = chat[-1] if isinstance(chat, list) and chat else None
    if not isinstance(chat, list) or not isinstance(last, dict) or len(chat) < 1 + needs_prompt:
        kind = "two or more messages" if needs_prompt else "a list of messages"
        raise Malformed(f"{name!r} is {shown(chat)}, must be {kind}, {why}")
    if last.get("role") != "assistant":
        raise Malformed(
            f"the last message of {name!r} is of role {shown(last.get('role'))}, must be the "
            f"assistant's: it is the answer, {why}"
        )
    return chat[:-1], last.get("content")


def split_pair(
    prompt: object, answers: Mapping[str, object]
) -> tuple[object, tuple[object, object]]:
    """Return the prompt of a preference pair, and its answers without the chats around them.

    Args:
        prompt: as its column has it; None without one: then both answers are chats, and the
            messages before their last one are the prompt.
        answers: the chosen and the rejected one by name of their columns. Texts; or chats that end
            with the answer, by itself or after the prompt.

    Returns:
        Prompt, and chosen and rejected answer, whose texts are not checked yet.

    Raises:
        Malformed: the answers are equal, or not of one kind; or the chats begin differently.
    """
    (name, chosen), (other, rejected) = answers.items()
    has_none = prompt is None
    before: list[object] = []
    if has_none or isinstance(chosen, list) or isinstance(rejected, list):
        why = "since data.prompt_key is null" if has_none else "as the other answer is"
        before, chosen = split_answer(chosen, name, why=why, needs_prompt=has_none)
        before_other, rejected = split_answer(rejected, other, why=why, needs_prompt=has_none)
        if before != before_other:
            raise Malformed(f"{name!r} and {other!r} differ before their last message")
    if chosen == rejected:
        raise Malformed(f"{name!r} and {other!r} are equal: a pair needs two answers")
    if not has_none and before and before != prompt:
        raise Malformed(
            f"{name!r} has messages before the answer, and they are not the prompt of its own "
            "column; set data.prompt_key=null to take them as the prompt"
        )
    return before if has_none else prompt, (chosen, rejected)
