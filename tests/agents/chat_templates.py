"""Small tokenizers with chat templates of several families: one token a byte, and special ones."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

QWEN25 = r"""
{%- if tools %}<|im_start|>system
Tools:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# Reasoning of turns before the last user's turn is dropped; a last turn without it shows a block.
QWEN3 = r"""
{%- set ns = namespace(last_query=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_query = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
{{- '\n<tool_response>\n' + m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{% set text = m.content.split('</think>')[-1].lstrip('\n') %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set thought = thought if '</think>' in m.content else '' %}
{%- if m.role != 'assistant' %}{% set text = m.content %}
{%- elif loop.index0 > ns.last_query and (loop.last or thought) %}<think>
{{ thought }}
</think>

{% endif %}
{{- text }}{% for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

LLAMA3 = r"""<|begin_of_text|>
{%- for m in messages %}
{%- if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ m.content | tojson }}<|eot_id|>
{%- elif m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call a turn') }}{% endif -%}
<|start_header_id|>assistant<|end_header_id|>

{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
    m.tool_calls[0].function.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


# What the templates of models with formats of their own do with calls and results, and no more.
QWEN3_CODER = r"""
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>
{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# The token that begins the next role ends a turn.
GLM45 = r"""[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|observation|>{% endif %}
{{- '\n<tool_response>\n' + m.content }}
</tool_response>
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments.items() %}
<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
</tool_call>{% endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# Shows the number of a call, and the name of a result's tool.
KIMI_K2 = r"""
{%- for m in messages %}
{%- set name = m.get('name') or m.role %}
{%- set kind = m.role if m.role in ('user', 'assistant') else 'system' -%}
<|im_{{ kind }}|>{{ name }}<|im_middle|>
{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}
{% endif %}{{ m.content }}
{%- if m.tool_calls %}<|tool_calls_section_begin|>
{%- for call in m.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""

# A result is from its tool; calls and answers end differently.
GPT_OSS = r"""
{%- set ns = namespace(called='') %}
{%- for m in messages %}
{%- if m.tool_calls %}{% set ns.called = m.tool_calls[0].function.name -%}
<|start|>assistant to=functions.{{ ns.called }}<|channel|>commentary json<|message|>
{{- m.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>
{%- elif m.role == 'tool' -%}
<|start|>functions.{{ ns.called }} to=assistant<|channel|>commentary<|message|>
{{- m.content | tojson }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# Arguments are JSON; behind a result the model goes on without a beginning.
DEEPSEEK_V31 = r"""
{%- for m in messages %}
{%- if m.role == 'user' %}<｜User｜>{{ m.content }}
{%- elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>
{%- else %}
{%- if messages[loop.index0 - 1].role == 'user' %}<｜Assistant｜></think>{% endif %}
{{- m.content }}
{%- if m.tool_calls %}<｜tool▁calls▁begin｜>{% for call in m.tool_calls -%}
<｜tool▁call▁begin｜>{{ call.function.name + '<｜tool▁sep｜>' + call.function.arguments -}}
<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜></think>{% endif %}"""


@dataclass(frozen=True, slots=True)
class Family:
    """A template, its special tokens, and those that end a turn, the usual one first."""

    template: str
    specials: tuple[str, ...]
    stop: str
    others: tuple[str, ...] = ()

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop, *self.others)


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, "<|im_end|>"),
    "qwen3": Family(QWEN3, _CHATML, "<|im_end|>"),
    "llama3": Family(LLAMA3, _LLAMA, "<|eot_id|>"),
}

_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
_DEEPSEEK = tuple(f"<｜tool▁{part}｜>" for part in ("calls▁begin", "calls▁end", "call▁begin"))
_DEEPSEEK += ("<｜tool▁sep｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
CALLING = {
    "qwen3_coder": Family(QWEN3_CODER, _CHATML, "<|im_end|>"),
    "glm45": Family(
        GLM45,
        ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
        "<|observation|>",
        ("<|user|>",),
    ),
    "kimi_k2": Family(
        KIMI_K2,
        ("<|im_end|>", "<|im_middle|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
        "<|im_end|>",
    ),
    "gpt_oss": Family(GPT_OSS, (*_HARMONY, "<|constrain|>"), "<|call|>", ("<|return|>",)),
    "deepseek_v31": Family(DEEPSEEK_V31, _DEEPSEEK, "<｜end▁of▁sentence｜>"),
}
"""By the format in which their models call tools."""


def build_tokenizer(family: str, *, template: str | None = None) -> PreTrainedTokenizerBase:
    """Return the family's tokenizer, with another template if one is given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    chosen = (FAMILIES | CALLING)[family]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chosen.stop,
        additional_special_tokens=list(chosen.specials),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chosen.template if template is None else template
    return fast


TOKENIZERS = {family: build_tokenizer(family) for family in FAMILIES}
