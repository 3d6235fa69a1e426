"""A byte-level tokenizer without merges: 256 bytes and three control tokens, one id a byte of text."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS, VOCAB_SIZE = 256, 259


def write(folder, change=lambda tokenizer: None):
    """Write tokenizer.json and tokenizer_config.json; `change` may alter the tokenizer before."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    change(tokenizer)
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(
        {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}))
    return Path(folder)
