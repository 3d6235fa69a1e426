"""The plan is the run: the same events, the same bytes, and an arena of exactly the planned size."""

import pytest

from mesp_np.engine import plan_step
from mesp_np.ledger import first_difference
from tests import small

METHODS = (*small.EXACT, "mezo")


def check(config=None, **changes):
    config = config or small.model_config()
    with small.engine(config, **changes) as engine:
        run = engine.run
        batch = small.batch(config, run.batch_size, run.seq)
        planned = engine.plan
        for _ in range(2):                       # the second step must place its tensors as the first did
            engine.step([batch] * run.grad_accumulation, rate=1e-3)
            ledger = engine.arena.ledger
            assert first_difference(planned.setup_events, engine.setup_events) is None
            assert first_difference(planned.ledger.events, ledger.events) is None
            assert ledger.live_peak == planned.live_peak_bytes
            assert ledger.stage_peak_bytes() == planned.ledger.stage_peak_bytes()
            assert sum(ledger.category_bytes_at_peak().values()) == ledger.live_peak
        assert engine.arena.extent == engine.arena.capacity == planned.extent_bytes


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size, seq, rank", [(1, 1, 1), (1, 64, 64), (3, 7, 4), (2, 131, 8)])
def test_shapes(method, batch_size, seq, rank):
    check(method=method, batch_size=batch_size, seq=seq, rank=rank)


@pytest.mark.parametrize("loss", ["rows:1", "rows:64", "rows:4000", "vocab:1", "vocab:64", "vocab:4000"])
@pytest.mark.parametrize("batch_size, seq, rank", [(1, 1, 64), (3, 1, 1), (1, 7, 1), (3, 7, 64), (3, 64, 1),
                                                   (1, 64, 64), (1, 1000, 64), (3, 1000, 1)])
def test_sequences_ranks_and_chunks_of_the_loss(batch_size, seq, rank, loss):
    """Chunks of one, in between, and beyond all there is."""
    check(batch_size=batch_size, seq=seq, rank=rank, loss=loss, config=small.model_config(num_hidden_layers=1))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss", ["rows:1", "rows:1000", "vocab:10", "vocab:1000", "full"])
@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_losses_and_trainables(method, loss, trainable):
    check(method=method, loss=loss, trainable=trainable)


@pytest.mark.parametrize("changes", [
    dict(optimizer="adamw"), dict(optimizer="adamw", clip=1.0), dict(update="fused"),
    dict(grad_accumulation=3), dict(targets=("q_proj", "v_proj")), dict(targets=("down_proj",)),
    dict(dtype="float64"), dict(threads=2), dict(method="mezo", probes=3), dict(method="mezo", perturb="inplace"),
    dict(keep=("x", "mid")), dict(keep=("p",)), dict(keep=("silu", "hd")), dict(keep=("act", "q")),
], ids=str)
def test_options(changes):
    check(**changes)


def test_the_workers_scratch_is_the_same_for_every_stored_form():
    def scratch(weights):
        planned = plan_step(small.model_config(), small.run_config(), weights=weights)
        return [event for event in planned.setup_events if event.category == "weight_tile"]

    dense = scratch(small.weights(small.model_config()))
    assert len(dense) == 1 and [event.shape for event in scratch(None)] == [event.shape for event in dense]
