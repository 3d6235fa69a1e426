"""Train the small default model's tokenizer: a byte-level BPE with 1024 tokens, built like Qwen2.5's.

Run it on the folder that make_corpus.py wrote:

    python tools/make_tokenizer.py CORPUS OUT

It learns from CORPUS/pretrain.train.txt and CORPUS/verse/train.jsonl, never from validation text, and writes
OUT/tokenizer.json and OUT/tokenizer_config.json. Needs the `tokenizers` package.
"""

import argparse
import json
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

VOCAB_SIZE = 1024
MAX_LENGTH = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Qwen2's rule for what a token may never span: contractions, words with one leading mark or space, single digits,
# punctuation, line ends, and spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"
    r"|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SAMPLES = (
    "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\n",
    "CRLF\r\n\r\nline ends,\ttabs,   runs of  spaces and a last one ",
    "naïve Æsop, 漢字, русский, 🎭👩‍🚀 and 1623",
)


def new_tokenizer() -> Tokenizer:
    """An untrained tokenizer; all 256 bytes are in its alphabet, so no text is ever unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: list[str]) -> Tokenizer:
    """Learn the merges, then add the special tokens, which so get the last ids as in Qwen2.5."""
    tokenizer = new_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def check(tokenizer: Tokenizer) -> None:
    """Stop unless the vocabulary is full and text comes back from its ids unchanged."""
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"make_tokenizer: {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}: too little text")
    for sample in SAMPLES:
        if tokenizer.decode(tokenizer.encode(sample).ids) != sample:
            raise SystemExit(f"make_tokenizer: {sample!r} does not survive encoding and decoding")


def config() -> dict:
    """What a loader needs to know beyond tokenizer.json, under the names Hugging Face gives it."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }


def read_corpus(corpus: Path) -> list[str]:
    """The plays as one text, and each record of verse."""
    plays, verse = corpus / "pretrain.train.txt", corpus / "verse" / "train.jsonl"
    for path in plays, verse:
        if not path.is_file():
            raise SystemExit(f"make_tokenizer: no file {path}; run make_corpus.py first")
    records = verse.read_text(encoding="utf-8").splitlines()
    return [plays.read_text(encoding="utf-8"), *(json.loads(record)["text"] for record in records)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("corpus", type=Path, help="folder that make_corpus.py wrote")
    parser.add_argument("out", type=Path, help="folder to write to; made if missing")
    arguments = parser.parse_args()
    tokenizer = train(read_corpus(arguments.corpus))
    check(tokenizer)
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    config_text = json.dumps(config(), indent=2, ensure_ascii=False) + "\n"
    (arguments.out / "tokenizer_config.json").write_text(config_text, encoding="utf-8", newline="\n")
    print(f"{arguments.out}: tokenizer with {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
