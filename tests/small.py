"""Small random models and batches for the tests, at ordinary and awkward shapes."""

import numpy as np

from mesp_np.batch import Batch
from mesp_np.config import ModelConfig, RunConfig
from mesp_np.data.rows import Source, Writer
from mesp_np.engine import Engine, plan_step
from mesp_np.methods import METHODS, backprop
from mesp_np.ops.cross_entropy import IGNORE
from mesp_np.ops.quant import round_bf16

EXACT = tuple(name for name, method in METHODS.items() if method.exact)


def model_config(**changes):
    """Two layers, six query heads on two key/value heads, sizes that divide nothing."""
    sizes = dict(vocab_size=83, hidden_size=48, intermediate_size=70, num_hidden_layers=2, num_attention_heads=6,
                 num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, tie_word_embeddings=True)
    return ModelConfig(**(sizes | changes))


def weights(config, dtype="float32", seed=0):
    """Checkpoint name -> random array; every bias and norm weight non-trivial.  dtype bf16 gives stored bits."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in config.weight_shapes().items():
        values = 0.3 * rng.standard_normal(shape)
        values = (1 + values if "norm" in name else values).astype(np.float32)
        made[name] = round_bf16(values) if dtype == "bf16" else values.astype(dtype)
    return made


def batch(config, B, T, ignored=0.2, seed=0):
    """Random ids and labels, some of them ignored."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, config.vocab_size, (B, T))
    labels = rng.integers(0, config.vocab_size, (B, T))
    labels[rng.random((B, T)) < ignored] = IGNORE
    labels[0, 0] = config.vocab_size - 1
    return Batch.of(ids, labels)


def run_config(**changes):
    settings = dict(batch_size=3, seq=13, rank=4, loss="rows:5", optimizer="sgd")
    return RunConfig(**(settings | changes))


def log_probabilities(engine, ids):
    """(B, T, V) of an engine's model: every token in turn as the label of every position of ids (B, T)."""
    columns = []
    for token in range(engine.config.vocab_size):
        with engine.model.inputs(Batch.of(ids, np.full_like(ids, token))) as inputs:
            backprop.forward_losses(engine, inputs)
            columns.append(-inputs.losses.reshape(ids.shape))
    return np.stack(columns, -1)


def engine(config=None, stored="float32", **changes):
    """An engine in a poisoned arena of exactly the planned size, with adapters that are not zero."""
    config, run = config or model_config(), run_config(**changes)
    checkpoint = weights(config, stored)
    plan = plan_step(config, run, weights=checkpoint)
    made = Engine(config, checkpoint, run, plan.extent_bytes, poison=True)
    rng = np.random.default_rng(1)
    for parameter in made.parameters:
        if run.trainable == "lora":
            parameter.value[:] = 0.2 * rng.standard_normal(parameter.value.shape)
    made.plan = plan
    return made


def rows(pairs):
    """data.rows.Rows from (ids, labels) pairs."""
    writer = Writer()
    for ids, labels in pairs:
        writer.add(ids, labels)
    return writer.rows(Source("pairs"))
