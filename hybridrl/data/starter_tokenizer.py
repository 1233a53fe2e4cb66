"""The tokenizer of the model that is made on the spot: one token a byte."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

EOS_TOKEN = "<|end|>"
PAD_TOKEN = "<|pad|>"
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
"""Of a model that sees, behind the other two, by the names that Qwen's models have."""

_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
_PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def build_starter_tokenizer(*, sees: bool = False) -> PreTrainedTokenizerBase:
    """Build it; ``save_pretrained`` puts it into the model's folder.

    Every text survives encoding and decoding, and a digit is one token. 256 bytes and two special
    tokens make 258 ids; the model's embedding may be larger. Its chat template has
    one letter a role, because every byte takes a token. hybridrl never pads: the pad token is there
    for other programs that read the folder. With ``sees`` messages may have images.
    """
    template = _CHAT_TEMPLATE.replace("{{ m.content }}", _PARTS) if sees else _CHAT_TEMPLATE
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        additional_special_tokens=list(VISION_TOKENS) if sees else [],
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
