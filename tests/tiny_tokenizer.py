"""A byte-level tokenizer without merges: 256 bytes and three control tokens, one id a byte of text."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS, IM_START, IM_END, VOCAB_SIZE = 256, 257, 258, 259
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# The form of Qwen2.5's: turns between control tokens, and a system turn of its own when there is none.
CHATML = """\
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def write(folder, change=lambda tokenizer: None, **config):
    """Write tokenizer.json and tokenizer_config.json; `change` may alter the tokenizer before, `config` adds keys."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROL])
    change(tokenizer)
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return Path(folder)
