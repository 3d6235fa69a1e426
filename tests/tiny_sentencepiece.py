"""Tokenizers of SentencePiece's kind: a space is a letter of its own, "\u2581", and words are not cut at line ends."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

BOS, EOS, VOCAB_SIZE = 1, 2, 200
CONTROL = ("<unk>", "<s>", "</s>")
LETTERS = ["\u2581", "\n", *map(chr, range(33, 127)), "\u00fc"]
MERGES = ["\u2581 a", "n \u2581", "a \n", "\n b"]         # across words and lines, which a cut would break
KINDS = ("first", "always", "never", "prepended", "unigram")


def write(folder, kind, normalized=False, **config):
    """Write tokenizer.json and tokenizer_config.json.

    kind        when "\u2581" is put before a text: first (only before all of it), always (after each control token
                too), never, or prepended by the normalizer, as Llama 2's; or unigram, which has its own control tokens
                among its words
    normalized  whether control tokens are looked for after the normalizer
    config      more keys of tokenizer_config.json
    """
    words = [*CONTROL, *LETTERS, *(merge.replace(" ", "") for merge in MERGES)]
    if kind == "unigram":
        tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    else:
        tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)},
                                         [tuple(merge.split(" ")) for merge in MERGES], unk_token="<unk>"))
    if kind == "prepended":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    else:
        scheme = kind if kind in ("first", "always", "never") else "first"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=normalized) for name in CONTROL])
    tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", BOS)])
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
                "unk_token": "<unk>"}
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(settings | config))
    return Path(folder)
