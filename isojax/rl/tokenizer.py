"""A tokenizer of bytes, for models that are made here: no vocabulary to fetch, and any text is one sequence of ids."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

PADDED_VOCAB = 320
"""Rows of the embedding of a model for this tokenizer: 259 ids, padded to whole blocks of 64."""

_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose id is the byte's value, then `<|endoftext|>` 256, `<|im_start|>` 257 and `<|im_end|>` 258.

    `save_pretrained` writes a folder that `AutoTokenizer` reads without a network. A turn of its chat
    template is `<|im_start|>role`, a newline, the content and `<|im_end|>`; it ends with `<|im_end|>` (`eos`) and pads
    with `<|endoftext|>`, as the tokenizers of Qwen do.
    """
    alphabet = bytes_to_unicode()  # The printable character that byte-level models write for a byte.
    model = models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT, TURN_START, TURN_END])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[TURN_START],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
