"""generate --chat: a conversation keeps its history and its cache, and ends when and as it should."""

import builtins
import io
import json
import shutil
import signal

import numpy as np
import pytest

from mesp_np.chat import Chat
from mesp_np.checkpoint import folder
from mesp_np.cli import generate as command
from mesp_np.cli import main
from mesp_np.data.encode import Encoder
from mesp_np.errors import UserError
from mesp_np.generate import generator
from tests import small, tiny_tokenizer

TEMPLATE = """{% if messages[0].role != "system" %}<|im_start|>system
default<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TURN_END, POSITIONS = 258, 200


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random model with a chat template, whose turns end with <|im_end|>: only generation_config.json says so."""
    path = tiny_tokenizer.write(tmp_path_factory.mktemp("chat-model"))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, max_position_embeddings=POSITIONS)
    folder.save(path, config, small.weights(config), path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [tiny_tokenizer.EOS, TURN_END]}))
    return folder.load(path)


@pytest.fixture
def script(checkpoint):
    """Makes a chooser that says one text after the other, each with its end, whatever the logits are."""
    def make(*answers, end=TURN_END):
        ids = [i for text in answers for i in (*checkpoint.tokenizer.encode(text), end)]
        return lambda logits: ids.pop(0)
    return make


@pytest.fixture
def chat(checkpoint, script):
    """A Chat that answers "one", "two", ...; `passes` lists the ids of everything that it computed."""
    run = dict(trainable="none", batch_size=1, seq=POSITIONS)
    with small.engine(checkpoint.config, **run) as engine:
        source = generator(engine, POSITIONS)
        made = Chat(source, Encoder(checkpoint.tokenizer, checkpoint.chat), checkpoint.eos_ids,
                    script("one", "two", "three"))
        compute, made.passes = source.logits, []

        def watched(ids):
            made.passes.append(list(ids))
            return compute(ids)

        source.logits = watched
        yield made


@pytest.fixture
def talk(checkpoint, monkeypatch, capsys):
    """Runs `generate --chat` on the folder with a scripted model: (exit code, stdout, stderr)."""
    def run(chooser, *argv, lines=None, model=checkpoint.folder):
        monkeypatch.setattr(command, "sampler", lambda sampling, seed: chooser)
        if lines is not None:
            monkeypatch.setattr("sys.stdin", io.StringIO("".join(lines)))
        code = main(["generate", "--chat", "--model", str(model), *argv])
        return code, *capsys.readouterr()
    return run


@pytest.fixture
def terminal(monkeypatch):
    """Standard input is a terminal where someone types these lines; an exception is what a key like Ctrl-D raises."""
    def type_lines(*lines):
        typed = iter(lines)

        def read(prompt):
            line = next(typed)
            if not isinstance(line, str):
                raise line
            print(prompt + line)
            return line

        monkeypatch.setattr("sys.stdin", io.StringIO())
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        monkeypatch.setattr(builtins, "input", read)
    return type_lines


def test_history_is_kept_and_only_what_is_new_is_computed(chat, checkpoint):
    assert "".join(chat.answer("hi", 20)) == "one"
    computed = sum(map(len, chat.passes))
    assert "".join(chat.answer("go on", 20)) == "two"
    assert chat.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"},
                             {"role": "user", "content": "go on"}, {"role": "assistant", "content": "two"}]
    new = [i for ids in chat.passes for i in ids][computed:]
    turn = "<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert checkpoint.tokenizer.decode(new) == turn + "two"


def test_the_kept_cache_is_that_of_the_whole_conversation(chat, checkpoint):
    for text in ("hi", "go on"):
        list(chat.answer(text, 20))
    ids = chat.encoder.prompt([*chat.messages, {"role": "user", "content": "and?"}])
    rest = chat.source.resume(ids)
    assert len(rest) < 50 < len(ids)
    kept = chat.source.logits(rest)
    chat.source.tokens.clear()
    np.testing.assert_allclose(kept, chat.source.logits(ids), rtol=1e-4, atol=1e-4)


def test_every_end_of_text_of_the_folder_ends_an_answer(talk, script):
    for end in (tiny_tokenizer.EOS, TURN_END):
        code, out, _ = talk(script("yes", end=end), "--prompt", "is it?")
        assert (code, out) == (0, "yes\n")


def test_a_line_of_a_pipe_is_a_turn(talk, script, monkeypatch):
    asked, plain = [], Encoder.prompt

    def watched(self, messages, tools=None):
        asked.append([message["content"] for message in messages])
        return plain(self, messages, tools)

    monkeypatch.setattr(Encoder, "prompt", watched)
    code, out, _ = talk(script("one", "two"), lines=["hi\n", "\n", "go on"])
    assert (code, out) == (0, "one\ntwo\n") and asked[1:] == [["hi"], ["hi", "one", "go on"]]


@pytest.mark.parametrize("argv, begins", [((), "<|im_start|>system\ndefault<|im_end|>"),
                                          (("--system", "Be kind."), "<|im_start|>system\nBe kind.<|im_end|>"),
                                          (("--system", ""), "<|im_start|>system\n<|im_end|>")])
def test_the_system_turn(talk, script, checkpoint, monkeypatch, argv, begins):
    seen, plain = [], command.Chat.answer

    def watched(self, text, count):
        answer = plain(self, text, count)
        seen.append(checkpoint.tokenizer.decode(self.encoder.prompt(self.messages[:-1])))
        return answer

    monkeypatch.setattr(command.Chat, "answer", watched)
    assert talk(script("yes"), "--prompt", "is it?", *argv)[0] == 0
    assert seen[0].startswith(begins)


def test_control_c_ends_an_answer_and_not_the_conversation(talk, script, terminal):
    """Asked to stop at its sixth letter, the model has the rest of its words left for the next turn."""
    choose, calls = script("a long answer"), []

    def interrupted(logits):
        calls.append(1)
        if len(calls) == len("a long"):
            signal.raise_signal(signal.SIGINT)
        return choose(logits)

    terminal("hi", "again", EOFError())
    code, out, _ = talk(interrupted)
    assert (code, out) == (0, "you> hi\na long\nyou> again\n answer\n\n")


@pytest.fixture
def heeded():
    """Ctrl-C as a terminal has it; a shell's background jobs start with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_control_c_leaves(talk, terminal, heeded):
    def interrupted(logits):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    terminal("hi")
    code, _, err = talk(interrupted)
    assert code == 130 and "interrupted" in err and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_leaving_at_the_prompt(talk, script, terminal):
    terminal(EOFError())
    assert talk(script())[0] == 0
    terminal(KeyboardInterrupt())
    assert talk(script())[0] == 130


def test_an_answer_that_fills_the_context_is_told(talk, script):
    code, out, err = talk(script("x" * 100), "--context", "80", "--prompt", "hi")
    assert code == 0 and 0 < len(out) < 80
    assert "the context is full" in err and "--context" in err
    assert "full" not in talk(script("x"), "--context", "80", "--prompt", "hi")[2]


def test_a_turn_that_is_too_long_is_refused_and_forgotten(talk, script, terminal, chat):
    terminal("x" * 100, "hi", EOFError())
    code, out, err = talk(script("yes"), "--context", "90")
    assert code == 0 and out.endswith("you> hi\nyes\n\n") and "there is room for 90" in err
    code, _, err = talk(script("yes"), "--context", "90", lines=["x" * 100])
    assert code == 1 and "there is room for 90" in err
    with pytest.raises(UserError, match="room"):
        chat.answer("x" * POSITIONS, 5)
    assert chat.messages == []


def test_a_folder_without_a_template(talk, script, checkpoint, tmp_path):
    plain = tmp_path / "plain"
    shutil.copytree(checkpoint.folder, plain)
    (plain / "chat_template.jinja").unlink()
    code, out, err = talk(script("yes"), "--prompt", "hi", model=plain)
    assert code == 1 and out == "" and "has no chat template" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("argv", [[], ["--prompt", "x", "--system", "y"], ["--prompt", "x", "--max-tokens", "0"],
                                  ["--prompt", "x", "--context", "0"], ["--chat", "--context", "99999"]])
def test_usage(checkpoint, capsys, argv):
    assert main(["generate", "--model", str(checkpoint.folder), *argv]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_plain_prompts_stop_at_the_same_tokens(checkpoint, script, monkeypatch, capsys):
    for end in (tiny_tokenizer.EOS, TURN_END):
        monkeypatch.setattr(command, "sampler", lambda sampling, seed, end=end: script(" sat", end=end))
        assert main(["generate", "--model", str(checkpoint.folder), "--prompt", "the cat"]) == 0
        assert capsys.readouterr().out == "the cat sat\n"
