"""Text from a model: one token after another, with a key/value cache.

The prompt goes through the blocks at once; then each new token alone, its query looking at
the keys and values of all positions before it.  The blocks are those of training; only
where attention takes its keys from differs.

    cache of a layer: k, v of (positions, K*E), filled from the front

A long prompt goes through CHUNK tokens at a time, so that the memory beside the cache does not
grow with it.
"""

import math
from dataclasses import dataclass

import numpy as np

from mesp_np.arena import Arena
from mesp_np.block import Block
from mesp_np.errors import UsageError, UserError
from mesp_np.ops import attention, embedding, linear, rmsnorm, rope
from mesp_np.params import put

CHUNK = 256


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0         # 0: the likeliest token
    top_p: float = 1.0               # draw from the smallest set of this much probability
    top_k: int = 0                   # draw from this many of the likeliest tokens; 0: from all

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise UsageError("--temperature and --top-k must be 0 or more, --top-p in (0, 1]")


class CachedBlock(Block):
    """A block for one sequence whose T rows continue what is in its cache."""

    def __init__(self, *args, cache, first):
        super().__init__(*args)
        self.cache, self.first = cache, first

    def _attend(self, tile, out, q, k, v):
        """Put k and v, all new ones so far, into the cache, and let q (C, H*E) look at all S positions there."""
        stop = self.first + tile.rows.stop
        for rows, new in zip(self.cache, (k, v), strict=True):
            put(self.team, rows[self.first:stop], lambda new=new: new)
        shape = 1, self.config.num_attention_heads, len(q), stop
        size = attention.forward_scratch(len(q), stop)
        with self.arena.temp("scores", (self.team.threads, size)) as scratch:
            keys, values = (rows[:stop] for rows in self.cache)
            attention.forward(self.team, out, q, keys, values, self.starts[tile.rows], shape, scratch)


class Generator:
    """Logits of the next token, for a sequence that grows to `positions` tokens.

    engine    engine.Engine, whose weights and adapters are used
    capacity  bytes of its own arena, from `memory_needed`; None for a phantom
    tokens    the ids whose keys and values are in the cache
    """

    def __init__(self, engine, positions, capacity=None):
        self.config, self.params, self.team = engine.config, engine.model.params, engine.team
        self.row_tile = engine.run.row_tile
        self.arena, self.positions, self.tokens = Arena(capacity, engine.arena.dtype), positions, []
        c, arena = self.config, self.arena
        self.tables = [arena.alloc(name, (positions, c.head_dim // 2), category="input") for name in ("cos", "sin")]
        rope.tables(self.team, *self.tables, c.rope_theta)
        self.starts = arena.alloc("starts", (positions,), np.int32, "input")
        put(self.team, self.starts, lambda: np.zeros(positions, np.int32))
        self.caches = [[arena.alloc(f"layer.{index}.cache.{name}", (positions, c.key_width), category="kept")
                        for name in ("k", "v")] for index in range(c.num_hidden_layers)]

    def resume(self, ids):
        """Keep what the cache has of a sequence's beginning, forget the rest, and return the ids still to come.

        The last id is always to come: it takes its pass to know what follows it.
        """
        shared = min(len(self.tokens), len(ids) - 1)
        shared = next((n for n in range(shared) if self.tokens[n] != ids[n]), shared)
        del self.tokens[shared:]
        return ids[shared:]

    def logits(self, ids):
        """float64 (V,) for the token after `ids`, which continue what was given before."""
        for first in range(0, len(ids), CHUNK):
            found = self._next(ids[first:first + CHUNK], last=first + CHUNK >= len(ids))
        return found

    def _next(self, ids, last):
        """Put `ids` (T of them) through the blocks; the logits after them if they are the last."""
        arena, T, done = self.arena, len(ids), len(self.tokens)
        with arena.temp("ids", (T,), np.int32, "input") as tokens:
            put(self.team, tokens, lambda: np.array(ids, np.int32))
            x = arena.alloc("x", (T, self.config.hidden_size))
            embedding.forward(self.team, x, tokens, self.params.embed.value)
        places = [table[done:done + T] for table in self.tables] + [self.starts[:T]]
        for index, layer in enumerate(self.params.layers):
            block = CachedBlock(index, layer, self.config, (1, T), places, arena, self.team, self.row_tile,
                                cache=self.caches[index], first=done)
            x = block.through(x)
        self.tokens += ids
        found = self._head(x[-1:]) if last else None
        arena.free(x)
        return found

    def _head(self, x):
        """Logits of the last row x (1, D)."""
        arena, team, c = self.arena, self.team, self.config
        with (arena.temp("rstd", (1,)) as rstd, arena.temp("xn", x.shape) as xn,
              arena.temp("logits", (1, c.vocab_size), category="logits") as logits):
            rmsnorm.statistics(team, rstd, x, c.rms_norm_eps)
            rmsnorm.forward(team, xn, x, rstd, self.params.norm.value)
            linear.forward(team, logits, xn, self.params.head.value)
            return logits[0].astype(np.float64)


def memory_needed(engine, positions):
    """Extent in bytes of a Generator's arena: that of a phantom in its largest pass, the last chunk of all."""
    phantom = Generator(engine, positions)
    last = min(CHUNK, positions)
    phantom.tokens = [0] * (positions - last)
    phantom.logits([0] * last)
    return phantom.arena.extent


def generator(engine, positions):
    """A Generator with memory of its own for so many positions."""
    return Generator(engine, positions, memory_needed(engine, positions))


def likeliest(logits):
    """The id of the largest of logits (V,)."""
    return int(np.argmax(logits))


def sampler(sampling, seed=0):
    """A function from logits (V,) to an id, drawn as a Sampling says; its draws depend on the seed alone."""
    if sampling.temperature == 0:
        return likeliest
    rng = np.random.default_rng(seed)

    def draw(logits):
        order = np.argsort(-logits, kind="stable")[:sampling.top_k or None]
        p = np.exp((logits[order] - logits[order[0]]) / sampling.temperature)
        p /= p.sum()
        kept = np.cumsum(p) - p < sampling.top_p              # the first token always is
        return int(rng.choice(order[kept], p=p[kept] / p[kept].sum()))

    return draw


def generate(source, ids, count, eos_ids=frozenset(), choose=likeliest):
    """Iterate over up to `count` new ids after a sequence's; they end before an end-of-text id.

    source  a Generator; what its cache has of the sequence's beginning is not computed again
    choose  logits (V,) -> id

    Raises UserError when there is no room for the sequence and one token.
    """
    if not ids:
        raise UserError("the prompt has no token", "give --prompt some text")
    room = source.positions - len(ids)
    if room < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, there is room for {source.positions}",
                        "shorten it, or raise --context")
    return _continue(source, source.resume(ids), min(count, room), eos_ids, choose)


def _continue(source, new, count, eos_ids, choose):
    for _ in range(count):
        logits = source.logits(new)
        if not np.isfinite(logits).all():
            raise UserError("the model's next token is not a number", "its weights, or the adapter's, are damaged")
        token = choose(logits)
        if token in eos_ids:
            return
        yield token
        new = [token]


def pieces(new, tokenizer, before=()):
    """The text of new ids as it grows; a character of several tokens waits until it is whole.

    before  ids that stand before them: some tokenizers write the first of a text otherwise
    """
    ids = list(before)
    shown = tokenizer.decode(ids)
    for token in new:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[len(shown):]
            shown = text
    yield tokenizer.decode(ids)[len(shown):]
