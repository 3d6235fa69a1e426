"""Targets by hand: what is predicted from where, what is cut, what is skipped, and what is held in memory."""

import json
import os
import tempfile
import tracemalloc

import numpy as np
import pytest

from mesp_np.checkpoint import chat_template
from mesp_np.checkpoint.tokenizer import Tokenizer
from mesp_np.data import rows
from mesp_np.data.encode import Encoder
from mesp_np.errors import UsageError, UserError
from tests import small, tiny_tokenizer

EOS = tiny_tokenizer.EOS


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    folder = tiny_tokenizer.write(tmp_path_factory.mktemp("tokenizer"), chat_template=tiny_tokenizer.CHATML)
    tokenizer, chat = Tokenizer(folder, tiny_tokenizer.VOCAB_SIZE), chat_template.find(folder)
    return lambda **options: Encoder(tokenizer, chat, **options)


@pytest.fixture
def encoder(encoders):
    return encoders()


class Given:
    """An encoder that gives what a row says: {"prompt": "", "completion": "[ids, mask]"}."""

    mask_prompt = False

    def encode(self, record):
        ids, mask = json.loads(record.plain[1])
        return np.array(ids, np.int32), np.array(mask, bool)


def given(tmp_path, *pairs, seq=8, max_bad_rows=0):
    lines = [json.dumps({"prompt": "", "completion": json.dumps(pair)}) for pair in pairs]
    return load(tmp_path, Given(), *lines, seq=seq, max_bad_rows=max_bad_rows)


def load(tmp_path, encoder, *lines, seq=8, max_bad_rows=0, name="x.jsonl"):
    path = tmp_path / name
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return rows.load_file(path, encoder, seq, max_bad_rows)


def texts(*texts):
    return [json.dumps({"text": text}) for text in texts]


def pairs(made):
    return [(row.ids.tolist(), row.labels.tolist()) for row in map(made.row, range(len(made)))]


def skipped(made):
    return {reason: [where.split("/")[-1] for where in places.first] for reason, places in made.source.skipped.items()}


def test_text_row(tmp_path, encoders):
    a, b, c = encoders().tokenizer.encode("abc")
    assert pairs(load(tmp_path, encoders(), *texts("abc"))) == [([a, b, c], [b, c, EOS])]
    assert pairs(load(tmp_path, encoders(eos=False), *texts("abc"))) == [([a, b], [b, c])]


def test_cut_rows_have_no_end_of_text(tmp_path, encoder):
    ids = encoder.tokenizer.encode("abcdefghijkl")
    for length, targets, truncated in ((7, ids[1:7] + [EOS], 0), (8, ids[1:8] + [EOS], 0),
                                       (9, ids[1:9], 1), (12, ids[1:9], 1)):
        made = load(tmp_path, encoder, *texts("abcdefghijkl"[:length]))
        assert pairs(made)[0][1] == targets and made.source.truncated == truncated


def test_document_windows_predict_every_token_once(tmp_path, encoders):
    text = "the quick brown fox\n"
    tokens = encoders().tokenizer.encode(text) + [EOS]
    for seq in (1, 3, 4, 8, 19, 20, 100):
        made = load(tmp_path, encoders(), text[:-1], seq=seq, name="x.txt")
        assert sum((labels for _, labels in pairs(made)), []) == tokens[1:]
        assert sum((ids for ids, _ in pairs(made)), []) == tokens[:-1]
        assert set(made.lengths[:-1].tolist()) <= {seq} and made.source.truncated == 0
        assert made.source.forms == {"document": 1}
    assert load(tmp_path, encoders(eos=False), text[:-1], name="x.txt").trained_tokens == len(tokens) - 2


def test_conversations_that_begin_with_an_answer_are_counted_when_prompts_are_masked(tmp_path, encoders):
    turns = [{"role": role, "content": "a"} for role in ("assistant", "user", "assistant")]
    lines = [json.dumps({"messages": turns}), json.dumps({"messages": turns[1:]})]
    source = load(tmp_path, encoders(mask_prompt=True), *lines, seq=200).source
    assert source.unasked.count == 1 and source.unasked.first[0].endswith("x.jsonl:1")
    assert load(tmp_path, encoders(), *lines, seq=200).source.unasked.count == 0


def test_rows_without_a_target_are_counted(tmp_path, encoders):
    made = load(tmp_path, encoders(eos=False), *texts("", "a", "ab"))
    assert len(made) == 1 and skipped(made) == {"fewer than two tokens": ["x.jsonl:1", "x.jsonl:2"]}
    made = load(tmp_path, encoders(), *texts("", "a"), '{"messages": []}')
    assert len(made) == 1 and skipped(made) == {"fewer than two tokens": ["x.jsonl:1", "x.jsonl:3"]}
    assert pairs(made)[0][1] == [EOS]
    with pytest.raises(UserError, match="no row can be trained .fewer than two tokens: .*x.jsonl:1"):
        load(tmp_path, encoders(), *texts(""))


def test_many_skipped_rows_are_counted_and_the_first_named(tmp_path, encoder):
    places = load(tmp_path, encoder, *texts(*[""] * 1000, "ab")).source.skipped["fewer than two tokens"]
    assert places.count == 1000 and len(places.first) == 12


def test_masks_belong_to_targets(tmp_path):
    """Tokens 10 11 12 13 with mask 0 0 1 0: only position 1, which predicts 12, has a target."""
    made = given(tmp_path, ([10, 11, 12, 13], [0, 0, 1, 0]), ([10, 11], [1, 0]), ([10] * 11, [0] * 9 + [1, 1]))
    assert pairs(made) == [([10, 11, 12], [-100, 12, -100])]
    assert skipped(made) == {"no token to train": ["x.jsonl:2"], "no token to train within 9": ["x.jsonl:3"]}
    assert made.source.truncated == 1 and (made.tokens, made.trained_tokens) == (3, 1)
    with pytest.raises(UserError, match="no token to train: .*x.jsonl:1, .*x.jsonl:2"):
        given(tmp_path, *[([10, 11], [1, 0])] * 2)


def test_answers_that_are_cut_off_are_skipped(tmp_path, encoders):
    """Prompt beyond the length: nothing of its answer is left, so it is no row; the next one is."""
    long, fits = ({"messages": [{"role": "system", "content": ""}, {"role": "user", "content": "x" * count},
                                {"role": "assistant", "content": "yes"}]} for count in (100, 1))
    made = load(tmp_path, encoders(mask_prompt=True), json.dumps(long), json.dumps(fits), seq=64)
    assert made.trained_tokens == 4 and skipped(made) == {"no token to train within 65": ["x.jsonl:1"]}


def test_bad_rows(tmp_path, encoder):
    lines = [*texts("ab"), "{", *texts("cd"), '{"text": 3}', *texts("ef")]
    made = load(tmp_path, encoder, *lines, max_bad_rows=2)
    assert len(made) == 3 and made.source.bad.count == 2
    assert "x.jsonl:2: not one JSON object" in made.source.bad.first[0]
    with pytest.raises(UserError, match="more than 1 bad rows.*\n.*x.jsonl:2: .*\n.*x.jsonl:4: \"text\" is 3"):
        load(tmp_path, encoder, *lines, max_bad_rows=1)
    with pytest.raises(UserError, match="^[^\n]*x.jsonl:2: not one JSON object[^\n]*$"):
        load(tmp_path, encoder, *lines[:3])
    with pytest.raises(UserError) as raised:
        load(tmp_path, encoder, *["{"] * 100, *texts("ab"))
    assert len(str(raised.value).splitlines()) == 14 and str(raised.value).endswith("and more")
    with pytest.raises(UserError, match="no row can be trained .bad rows: 2, such as .*x.jsonl:1: not one JSON object"):
        load(tmp_path, encoder, "{", "{", max_bad_rows=5)


def test_a_flag_that_does_not_fit_is_no_bad_row(tmp_path, encoders):
    with pytest.raises(UsageError, match="--mask-prompt: .*x.jsonl:1 is a text"):
        load(tmp_path, encoders(mask_prompt=True), *texts("ab"), max_bad_rows=9)


def test_forms_are_decided_row_by_row(tmp_path, encoder):
    made = load(tmp_path, encoder, *texts("ab"), '{"messages": [{"role": "user", "content": "a"}]}', *texts("c"),
                '{"prompt": "a", "completion": "b"}', seq=99)
    assert made.source.forms == {"text": 2, "messages": 1, "completion": 1}


def test_texts_that_spell_control_tokens_are_counted(tmp_path, encoder):
    made = load(tmp_path, encoder, *texts("<|im_start|>user", "a<|endoftext|>", "a"), seq=99)
    assert made.source.written.count == 1 and made.source.written.first[0].endswith("x.jsonl:1")


@pytest.mark.parametrize("count, held", [(1, 0), (2, 1), (19, 1), (20, 1), (60, 3), (287, 14)])
def test_hold_out(count, held):
    made = small.rows([([i], [i]) for i in range(count)])
    train, valid = rows.hold_out(made, seed=3)
    assert len(valid) == held and pairs(rows.hold_out(made, seed=3)[0]) == pairs(train)
    assert sorted(ids[0] for ids, _ in pairs(train) + pairs(valid)) == list(range(count))
    if held > 2:
        assert pairs(rows.hold_out(made, seed=4)[1]) != pairs(valid)


def test_load(tmp_path, encoders):
    (tmp_path / "train.jsonl").write_text('{"text": "abc"}\n' * 40)
    train, valid = rows.load(tmp_path, encoders(), seq=8)
    assert (len(train), len(valid)) == (38, 2) and train.source is valid.source
    (tmp_path / "valid.jsonl").write_text('{"text": "abcd"}\n')
    train, valid = rows.load(tmp_path, encoders(eos=False), seq=8)
    assert (len(train), len(valid), valid.tokens) == (40, 1, 3)
    (tmp_path / "valid.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no row can be trained .*valid.jsonl:1"):
        rows.load(tmp_path, encoders(), seq=8)


@pytest.mark.parametrize("content", ["", "\n\n", "\ufeff", "  \r\n"])
def test_empty_files(tmp_path, encoder, content):
    for name in ("data.jsonl", "data.txt"):
        (tmp_path / name).write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=f"{name}: is empty"):
            rows.load_file(tmp_path / name, encoder, 8)


def test_neither_the_file_nor_its_tokens_are_held_in_memory(tmp_path):
    class Long(Given):
        def encode(self, record):
            return np.zeros(5000, np.int32), np.ones(5000, bool)

    path = tmp_path / "x.jsonl"
    path.write_text((json.dumps({"prompt": "", "completion": "x" * 5000}) + "\n") * 2000)
    tracemalloc.start()
    made = rows.load_file(path, Long(), 5000)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made.tokens == 2000 * 4999 and peak < 1_000_000 < path.stat().st_size
    assert sum(getattr(made, name).nbytes for name in ("starts", "lengths", "targets")) == 16 * len(made)
    assert isinstance(made.row(1999).ids.base, np.memmap)


def test_the_temporary_file_has_no_name_even_while_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    writer = rows.Writer()
    writer.add([1, 2], [2, 3])
    assert os.listdir(tmp_path) == []
    assert pairs(writer.rows(rows.Source("x"))) == [([1, 2], [2, 3])]


def test_no_room_for_the_tokens_is_one_clear_line(monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    writer = rows.Writer()
    monkeypatch.setattr(writer, "_file", type("Full", (), {"write": full})())
    with pytest.raises(UserError, match="cannot be written .No space left on device.; name a folder .*TMPDIR"):
        writer.add([1], [2])
