"""Text from a model: one token after another, with a key/value cache.

The prompt goes through the blocks at once; then each new token alone, its query looking at
the keys and values of all positions before it.  The blocks are those of training; only
where attention takes its keys from differs.

    cache of a layer: k, v of (positions, K*E), filled from the front
"""

import numpy as np

from mesp_np.arena import Arena
from mesp_np.block import Block
from mesp_np.errors import UserError
from mesp_np.ops import attention, embedding, linear, rmsnorm, rope
from mesp_np.params import put


class CachedBlock(Block):
    """A block for one sequence whose T rows continue what is in its cache."""

    def __init__(self, *args, cache, first):
        super().__init__(*args)
        self.cache, self.first = cache, first

    def _attend(self, out, q, k, v):
        """Put k and v into the cache, and let q (T, H*E) look at all S = first + T positions."""
        stop = self.first + self.T
        for rows, new in zip(self.cache, (k, v), strict=True):
            put(self.team, rows[self.first:stop], lambda new=new: new)
        shape = 1, self.config.num_attention_heads, self.T, stop
        size = attention.forward_scratch(self.T, stop)
        with self.arena.temp("tiles", (self.team.threads, size)) as tiles:
            keys, values = (rows[:stop] for rows in self.cache)
            attention.forward(self.team, out, q, keys, values, self.places[-1], shape, tiles)


class Generator:
    """Logits of the next token, for a sequence that grows to `positions` tokens.

    engine    engine.Engine, whose weights and adapters are used
    capacity  bytes of its own arena, from `memory_needed`; None for a phantom
    """

    def __init__(self, engine, positions, capacity=None):
        self.config, self.params, self.team = engine.config, engine.model.params, engine.team
        self.arena, self.positions, self.length = Arena(capacity, engine.arena.dtype), positions, 0
        c, arena = self.config, self.arena
        self.tables = [arena.alloc(name, (positions, c.head_dim // 2), category="input") for name in ("cos", "sin")]
        rope.tables(self.team, *self.tables, c.rope_theta)
        self.starts = arena.alloc("starts", (positions,), np.int32, "input")
        put(self.team, self.starts, lambda: np.zeros(positions, np.int32))
        self.caches = [[arena.alloc(f"layer.{index}.cache.{name}", (positions, c.key_width), category="kept")
                        for name in ("k", "v")] for index in range(c.num_hidden_layers)]

    def logits(self, ids):
        """float64 (V,) for the token after `ids`, which continue what was given before."""
        arena, T = self.arena, len(ids)
        with arena.temp("ids", (T,), np.int32, "input") as tokens:
            put(self.team, tokens, lambda: np.array(ids, np.int32))
            x = arena.alloc("x", (T, self.config.hidden_size))
            embedding.forward(self.team, x, tokens, self.params.embed.value)
        places = [table[self.length:self.length + T] for table in self.tables] + [self.starts[:T]]
        for index, layer in enumerate(self.params.layers):
            block = CachedBlock(index, layer, self.config, (1, T), places, arena, self.team,
                                cache=self.caches[index], first=self.length)
            out, _ = block.forward(x)
            arena.free(x)
            x = out
        self.length += T
        found = self._head(x[-1:])
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
    """Extent in bytes of a Generator's arena: that of a phantom that takes all positions at once."""
    phantom = Generator(engine, positions)
    phantom.logits([0] * positions)
    return phantom.arena.extent


def generator(engine, positions):
    """A Generator with memory of its own for so many positions."""
    return Generator(engine, positions, memory_needed(engine, positions))


def generate(source, ids, count, eos_ids=frozenset(), temperature=0.0, top_p=1.0, seed=0):
    """Yield up to `count` new ids after the prompt's; stops before an end-of-text id.

    source is a Generator; temperature 0 takes the likeliest token each time.  Raises UserError when there is no
    room for a prompt and one token.
    """
    if not ids:
        raise UserError("the prompt has no token", "give --prompt some text")
    room = source.positions - len(ids)
    if room < 1:
        raise UserError(f"the prompt has {len(ids)} tokens, there is room for {source.positions}", "shorten it")
    rng = np.random.default_rng(seed)
    new = list(ids)
    for _ in range(min(count, room)):
        token = choose(source.logits(new), temperature, top_p, rng)
        if token in eos_ids:
            return
        yield token
        new = [token]


def choose(logits, temperature, top_p, rng):
    """A token id from logits (V,): the largest, or drawn from the smallest set of probability top_p."""
    if temperature == 0:
        return int(np.argmax(logits))
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p, kind="stable")
    within = np.cumsum(p[order]) - p[order] < top_p           # the first token always is
    chosen = order[within]
    return int(rng.choice(chosen, p=p[chosen] / p[chosen].sum()))
