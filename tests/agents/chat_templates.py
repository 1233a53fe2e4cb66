"""Small tokenizers with chat templates of three families: one token a byte, and special tokens."""

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


@dataclass(frozen=True, slots=True)
class Family:
    """A template, its special tokens, and the one that ends a turn."""

    template: str
    specials: tuple[str, ...]
    stop: str


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
FAMILIES = {
    "qwen2.5": Family(QWEN25, _CHATML, "<|im_end|>"),
    "qwen3": Family(QWEN3, _CHATML, "<|im_end|>"),
    "llama3": Family(LLAMA3, _LLAMA, "<|eot_id|>"),
}


def build_tokenizer(family: str, *, template: str | None = None) -> PreTrainedTokenizerBase:
    """Return the family's tokenizer, with another template if one is given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    chosen = FAMILIES[family]
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=chosen.stop,
        additional_special_tokens=list(chosen.specials),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chosen.template if template is None else template
    return fast
