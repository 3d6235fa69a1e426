"""How fast this machine multiplies: single-precision products of the model's shapes, all cores at once.

A step is mostly products.  Its planned FLOPs in its seconds, over this rate, is the fraction of the machine that it
uses; the rest is everything that is not a product, and products of other shapes.
"""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from benchmarks.worker import serve

TRIES = 5


class Machine:
    """rate() is that of the best shape.  Each thread has a product of its own; BLAS runs one thread a call."""

    about = {}

    def __init__(self, spec):
        self.limits = threadpool_limits(limits=1, user_api="blas")
        self.pool = ThreadPoolExecutor(spec["threads"])
        rng = np.random.default_rng(0)
        self.products = [[tuple(rng.standard_normal(shape, np.float32) for shape in ((M, K), (K, N), (M, N)))
                          for _ in range(spec["threads"])] for M, K, N in spec["products"]]

    def rate(self):
        """FLOPs a second, together."""
        return max(self._rate(products) for products in self.products for _ in range(TRIES))

    def _rate(self, products):
        began = time.perf_counter()
        list(self.pool.map(lambda factors: np.matmul(factors[0], factors[1], out=factors[2]), products))
        seconds = time.perf_counter() - began
        return sum(2 * a.shape[0] * a.shape[1] * b.shape[1] for a, b, _ in products) / seconds


if __name__ == "__main__":
    serve(Machine)
