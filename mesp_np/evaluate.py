"""Evaluation: how well a model predicts the tokens of a file, without learning from them.

    loss            mean of -log p(token) over all tokens with a target, however they are batched
    perplexity      exp(loss): as unsure as among so many equally likely tokens
    token_accuracy  part of those tokens that were the likeliest
"""

import math
from dataclasses import asdict, dataclass

from mesp_np.engine import plan_loss
from mesp_np.errors import UserError
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
    """Evaluation of an engine's model on an iterable of batches.  Raises UserError when its loss is no number."""
    loss, hits, tokens = 0.0, 0, 0
    for batch in batches:
        batch_loss, batch_hits = engine.evaluate(batch)
        loss, hits, tokens = loss + batch_loss, hits + batch_hits, tokens + batch.trained_tokens
    if not math.isfinite(loss):
        raise UserError(f"the loss is not a number ({loss})", "the model's weights, or the adapter's, are damaged; if "
                        "they were trained just now, try a smaller --lr")
    return Evaluation(loss / tokens, hits / tokens, tokens)


def memory_needed(config, run, batches, weights):
    """Extent in bytes of an engine that evaluates the batches of an InOrder."""
    return max(plan_loss(config, run, shape, weights) for shape in batches.shapes())
