"""A tiny model folder and a tiny text, for commands to work on."""

from contextlib import contextmanager

import pytest

from mesp_np.checkpoint import folder
from tests import small, tiny_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A folder in Hugging Face form: two random layers, one token a byte."""
    path = tiny_tokenizer.write(tmp_path_factory.mktemp("model"))
    config = small.model_config(vocab_size=tiny_tokenizer.VOCAB_SIZE, max_position_embeddings=64)
    folder.save(path, config, small.weights(config), path)
    return str(path)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    path.write_text("".join(f'{{"text": "line {i}: the cat sat on the mat"}}\n' for i in range(24)))
    return str(path)


@pytest.fixture
def full_disk():
    """A block in which no file grows beyond so many bytes: as on a full disk, a part is written and then no more."""
    resource = pytest.importorskip("resource")

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited
