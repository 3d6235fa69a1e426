"""Evaluation: how well a model predicts the tokens of a file, without learning from them.

    loss            mean of -log p(token) over all tokens with a target, however they are batched
    perplexity      exp(loss): as unsure as among so many equally likely tokens
    token_accuracy  part of those tokens that were the likeliest
"""

from dataclasses import asdict, dataclass

from mesp_np.engine import plan_loss
from mesp_np.readout import perplexity


@dataclass(frozen=True)
class Evaluation:
    """The means over `trained_tokens` tokens."""

    loss: float
    token_accuracy: float
    trained_tokens: int

    def to_json(self):
        """Under the names of --json."""
        return asdict(self) | {"perplexity": perplexity(self.loss)}


def evaluate(engine, batches):
    """Evaluation of an engine's model on a sequence of batches."""
    loss, hits, tokens = 0.0, 0, 0
    for batch in batches:
        batch_loss, batch_hits = engine.evaluate(batch)
        loss, hits, tokens = loss + batch_loss, hits + batch_hits, tokens + batch.trained_tokens
    return Evaluation(loss / tokens, hits / tokens, tokens)


def memory_needed(config, run, batches, weights):
    """Extent in bytes of an engine that evaluates these batches."""
    return max(plan_loss(config, run, shape, weights) for shape in {batch.ids.shape for batch in batches})
