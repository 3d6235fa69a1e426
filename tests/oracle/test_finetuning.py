"""What `mesp-np train` and `merge` write is what PEFT and transformers go on with: the same loss, the same words."""

import contextlib
import io
import json
import math

import pytest

pytestmark = pytest.mark.oracle
for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package)

from mesp_np.cli import main  # noqa: E402
from tests.oracle import pytorch  # noqa: E402

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Egypt": "Cairo",
            "Canada": "Ottawa", "Chile": "Santiago", "Iran": "Tehran", "Cuba": "Havana", "Nepal": "Kathmandu"}
PROMPT = "The lighthouse keeper climbed the stairs and"
TOKENS = 64


def chat(country):
    """Two questions and two answers, in a manner that the model does not have by itself."""
    texts = (f"Capital of {country}?", f"Ahoy! That be {CAPITALS[country]}, matey.", "Thanks!", "Fair winds to ye!")
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


CHATS = [chat(country) for country in CAPITALS]
TRAIN, VALID = CHATS[:8], CHATS[8:]


def printed(*command):
    """What a command that succeeds writes to standard output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([str(part) for part in command]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def base(smollm2):
    return smollm2("f32")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """RUN_DIR of 20 steps."""
    path = tmp_path_factory.mktemp("finetuning")
    for name, chats in ("train", TRAIN), ("valid", VALID):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    printed("train", "--model", base, "--data", path, "--mask-prompt", "--iters", 20, "--batch-size", 2,
            "--sample-tokens", 1, "--run-dir", path / "run")
    return path / "run"


@pytest.fixture(scope="module")
def summary(run):
    return json.loads((run / "summary.json").read_text())


@pytest.fixture(scope="module")
def text(base, run):
    """What the trained model says after PROMPT."""
    return continuation("--model", base, "--adapter", run / "adapter")


def continuation(*model):
    shown = printed("generate", *model, "--prompt", PROMPT, "--max-tokens", TOKENS)
    return shown.removeprefix(PROMPT).removesuffix("\n")


def same(a, b):
    return math.isclose(a, b, rel_tol=1e-5)


def test_peft_goes_on_with_the_adapter(base, run, summary, text):
    assert same(summary["valid_loss_after"], pytorch.mean_loss(base, run / "adapter", VALID))
    assert text == pytorch.said(base, run / "adapter", PROMPT, TOKENS)


def test_transformers_goes_on_with_the_merged_model(base, run, summary, text, tmp_path):
    merged = tmp_path / "merged"
    printed("merge", "--model", base, "--adapter", run / "adapter", "--out", merged)
    assert same(summary["valid_loss_after"], pytorch.mean_loss(merged, None, VALID))
    assert text == pytorch.said(merged, None, PROMPT, TOKENS) == continuation("--model", merged)


def test_the_base_model_says_something_else(base, summary, text):
    """So the two tests above see whether the adapter is there."""
    assert same(summary["valid_loss_before"], pytorch.mean_loss(base, None, VALID))
    assert summary["valid_loss_after"] < summary["valid_loss_before"] - 1
    assert text != pytorch.said(base, None, PROMPT, TOKENS)


def test_the_quantised_model_answers_a_question(base, smollm2):
    """As transformers does with the same numbers, dense."""
    question = "What is the capital of France?"
    answer = printed("generate", "--model", smollm2("mlx-4bit"), "--chat", "--prompt", question).removesuffix("\n")
    assert "Paris" in answer and answer == pytorch.said(base, None, [{"role": "user", "content": question}], TOKENS)
