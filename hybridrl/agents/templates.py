"""Tokens that a chat template puts between two turns of the assistant.

What was sampled stays as it was sampled. The tokens of new messages are cut out of a small dummy
conversation, behind the end of the assistant's turn in it. Some templates show the model another
history once messages follow: then ``rewritten`` renders all of it, as the context of a new
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from hybridrl.data.images import expand
from hybridrl.data.prompts import SpecialTokens, message_parts
from hybridrl.data.rows import Malformed, Message
from hybridrl.errors import AgentError
from hybridrl.images import ImageSettings
from hybridrl.json_text import to_json_text

History = Literal["strict", "keep", "branch"]
"""``strict`` refuses a template that renders earlier turns differently once others follow; ``keep``
appends to them as they were sampled; ``branch`` begins a new sequence with them as rendered."""

_SENTINEL, _OTHER = "qzxsentinelxzq", "seven"
_QUESTION = {"role": "user", "content": "Question"}
_SHOWN_TOKENS = 6

_CASES = {
    "one tool result": (Message("tool", "42"),),
    "two tool results": (Message("tool", "42"), Message("tool", "a b")),
    "a user turn": (Message("user", "More"),),
}


class TurnTemplate:
    """Renders what follows a sampled turn."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        images: ImageSettings | None = None,
    ) -> None:
        """Read a chat template, which shows the schemas of ``tools`` in the prompt."""
        self._tokenizer = tokenizer
        self.images = images
        """How the model cuts images; None: it sees none."""
        self._tools = tuple(tools)
        texts = tokenizer.batch_decode([[token_id] for token_id in stop_token_ids])
        self._stops = dict(zip(texts, stop_token_ids, strict=True))
        self.specials = SpecialTokens(tokenizer, others=texts)
        """Those that end a turn among them."""
        self._form_before: dict[tuple[str, ...], int] = {}
        """By roles of new messages: index of the form that the turn before them has."""

    def beginning(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Return all tokens of a chat, up to the assistant's next turn.

        Special tokens within the messages lose their meaning, as in ``increment``. ``tools=None``
        shows those of the prompt. AgentError: the template cannot render it, or renders nothing.
        """
        fields = map(_fields_of, messages)
        new = [{**each, "content": self.specials.harmless(each["content"])} for each in fields]
        shown = self._tools if tools is None else tools
        token_ids = self._encode(self._render(new, tools=shown), new)
        if not token_ids:
            raise AgentError("the chat template renders the chat as no tokens; correct it")
        return token_ids

    def increment(self, messages: Sequence[Message], *, is_cut: bool = False) -> list[int]:
        """Return the tokens from behind a turn's stop token to the assistant's next turn.

        Special tokens within the messages lose their meaning: a space is put into their text. Of a
        turn that ``is_cut`` the stop token comes first. AgentError: the template cannot render
        tool results, or a user's turn, after an assistant's.
        """
        new = [*map(_fields_of, self.harmless(messages))]
        stop, suffix = self._suffix(new)
        return [self._stops[stop]] * is_cut + self._encode_behind(stop, suffix, new)

    def rewritten(
        self,
        history: Sequence[Message | Mapping[str, Any]],
        new: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int] | None:
        """Return the tokens of a conversation that the template renders differently than before.

        All tokens up to the assistant's next turn; None if the template only appended. Two
        renderings are compared, before and after the ``harmless`` new messages. So a turn that was
        sampled in other tokens than the tokenizer's, or in other words than the template's, is no
        difference. In the history the text of sampled turns is their content, calls included,
        because no template may write them in another form.
        """
        shown = self._tools if tools is None else tools
        old, added = ([_fields_of(m) for m in messages] for messages in (history, new))
        before = self._render(old, is_complete=True, tools=shown).rstrip()
        after = self._render([*old, *added], tools=shown)
        return None if after.startswith(before) else self._encode(after, [*old, *added])

    def written_call(self) -> str:
        """Return how the template writes a turn with a call, without the token that ends it.

        Empty: it has no form for calls, or rewrites what is before. AgentError: see ``increment``.
        """
        result = {"role": "tool", "content": "42", "tool_call_id": "functions.f:0"}  # as Kimi's
        turn = self._assistant([result], _OTHER)
        text, before = self._render([_QUESTION, turn], is_complete=True), self._render([_QUESTION])
        end = max((text.rfind(stop) for stop in self._stops), default=-1)
        written = text[: end if end > text.rfind(_OTHER) else None]
        is_shown = "tool_calls" in turn and written.startswith(before)
        return written[len(before) :] if is_shown else ""

    def harmless(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages whose special tokens have lost their meaning: a space is in them."""
        harmless = self.specials.harmless
        return [
            replace(
                each,
                content=harmless(each.content),
                name=harmless(each.name),
                call_id=harmless(each.call_id),
            )
            for each in messages
        ]

    def require_increments(self, *, history: History, roles: Sequence[str]) -> None:
        """Compare increments with full renderings, for results of tools and for a user's turn.

        AgentError names the case, the first differing token, and the remedy.
        """
        for case, messages in _CASES.items():
            if messages[0].role in roles:
                self._require_increment(case, [*map(_fields_of, messages)], history=history)

    def _require_increment(
        self, case: str, new: Sequence[Mapping[str, Any]], *, history: History
    ) -> None:
        stop, suffix = self._suffix(new)
        assistant = self._assistant(new, _OTHER)
        # DeepSeek's has no beginning of a turn behind a tool's result.
        if self._render([_QUESTION]) == self._render([_QUESTION], is_complete=True):
            raise AgentError(
                f"{case}: the chat template does not begin the assistant's next turn after it; "
                "write the turn's beginning under add_generation_prompt into the template"
            )
        full = self._encode(self._render([_QUESTION, assistant, *new]))
        before = self._render([_QUESTION, assistant], is_complete=True)
        begin = before.rfind(_OTHER)
        ends = [before.rfind(text) + len(text) for text in self._stops if text in before[begin:]]
        ended = before[: max(ends)] if ends else before + stop  # GLM: the next role ends a turn
        tail = self._encode_behind(stop, suffix)
        appended = self._encode(ended) + tail
        if full[-len(tail) :] != tail or (history == "strict" and full != appended):
            raise AgentError(self._describe_difference(case, full, appended))
        if history == "branch":
            text = self._render([_QUESTION, {"role": "assistant", "content": _OTHER}, *new])
            if _OTHER not in text:
                raise AgentError(
                    f"{case}: the chat template leaves the text of the assistant's turn out, so "
                    "history cannot be rendered from it; set agent.history=keep, or correct the "
                    "template"
                )

    def _describe_difference(self, case: str, full: list[int], appended: list[int]) -> str:
        pairs = zip_longest(full, appended)
        first = next(index for index, (a, b) in enumerate(pairs) if a != b)
        rendered, sampled = (
            self._tokenizer.decode(ids[first : first + _SHOWN_TOKENS]) for ids in (full, appended)
        )
        return (
            f"{case}: the chat template renders earlier turns differently once others follow; at "
            f"token {first} it writes {rendered!r}, and the conversation as sampled has "
            f"{sampled!r}; set agent.history=keep to train on the conversation as sampled, or "
            "agent.history=branch to begin a new sequence there, or correct the template"
        )

    def _suffix(self, new: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """Return the stop token that ends a dummy turn, and the text from there to the end."""
        text = self._render([_QUESTION, self._assistant(new, _SENTINEL), *new])
        begin = text.find(_SENTINEL) + len(_SENTINEL)
        ends = {text.find(stop, begin): stop for stop in self._stops if stop in text[begin:]}
        if not ends:
            raise AgentError(
                f"the chat template ends the assistant's turn with none of {sorted(self._stops)}; "
                "put the token that it writes there into eos_token_id of generation_config.json"
            )
        end, stop = min(ends.items())
        return stop, text[end + len(stop) :]

    def _assistant(self, new: Sequence[Mapping[str, Any]], text: str) -> dict[str, Any]:
        """Return a turn with ``text`` in the first form that the template accepts and shows.

        New messages of the same roles have the same form: one rendering instead of several.
        """
        roles = tuple(message["role"] for message in new)
        forms = list(_assistant_turns(text, new[0] if roles[0] == "tool" else {}))
        if roles not in self._form_before:
            self._form_before[roles] = self._find_form(forms, roles, text)
        return forms[self._form_before[roles]]

    def _find_form(
        self, forms: Sequence[Mapping[str, Any]], roles: Sequence[str], text: str
    ) -> int:
        # Not with the messages that somebody else wrote: they may hold the text, too.
        new = [{"role": role, "content": "42"} for role in roles]
        error: AgentError | None = None
        for index, form in enumerate(forms):
            try:
                rendered = self._render([_QUESTION, form, *new])
            except AgentError as refusal:
                error = refusal
                continue
            if text in rendered:
                return index
        raise error or AgentError(
            "the chat template leaves the assistant's turn out of the conversation, so nothing can "
            "be appended to it; correct the template"
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        is_complete: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [_with_parts(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=not is_complete,
            )
        except Exception as error:  # a template is a program, which may raise any error
            roles = ", ".join(str(message["role"]) for message in messages)
            raise AgentError(
                f"the chat template rejects a conversation of {roles}: {error}; use a model whose "
                "template has these roles, or correct it"
            ) from error
        return text

    def _encode(self, text: str, messages: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Encode text, with all the tokens of the messages' images."""
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        if self.images is None:
            return token_ids
        images = [image for message in messages for image in message.get("images", ())]
        try:
            return list(expand(token_ids, images, self.images.placeholder))
        except Malformed as error:
            raise AgentError(f"the chat {error}") from error

    def _encode_behind(
        self, stop: str, suffix: str, messages: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Encode text as it stands behind a stop token: some tokenizers begin with a space."""
        first, *token_ids = self._encode(stop + suffix, messages)
        if first != self._stops[stop]:
            raise AgentError(
                f"the tokenizer joins the stop token {stop!r} with the text behind it; declare it "
                "as a special token in tokenizer.json"
            )
        return token_ids


def _fields_of(message: Message | Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(message, Message):
        return message
    fields = {"role": message.role, "content": message.content, "images": message.images}
    named = {"name": message.name, "tool_call_id": message.call_id}
    return fields | {key: text for key, text in named.items() if text}


def _with_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as templates take it: of one with images the content has parts."""
    fields = dict(message)
    if fields.pop("images", ()):
        fields["content"] = message_parts(fields["content"])
    return fields


def _assistant_turns(text: str, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield turns with ``text``: in the arguments of a call, if it has a result, or as content."""
    arguments = {"x": text}
    # Most templates take the arguments as a mapping, some only as JSON; some know no calls.
    for each in (arguments, to_json_text(arguments)) if result else ():
        function = {"name": result.get("name", "f"), "arguments": each}
        call = {"id": result.get("tool_call_id", "call_1"), "function": function}
        yield {"role": "assistant", "content": "", "tool_calls": [{**call, "type": "function"}]}
    yield {"role": "assistant", "content": text}
