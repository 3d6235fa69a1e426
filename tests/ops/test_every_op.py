"""What every public function of every op must do; `op_calls.CALLS` lists them."""

import inspect
import pkgutil
from importlib import import_module

import numpy as np
import pytest

import mesp_np.ops
from mesp_np.team import Team
from tests import op_checks
from tests.op_calls import CALLS

BITS = {"upper_half", "pair"}                                        # whole numbers, the bits of one that is rounded
FLOAT64_RESULTS = {"total", "total_exp", "uniform", "normals", "_log", "_turn"}      # sums and noise, rounded later
FLOAT64_ARGUMENTS = {"_statistics", "_tables", "_add_noise", "_drop", "_add_dropped", "_sum",
                     "_add_squares"}                                 # eps, base, scale, rate, totals

every_call = pytest.mark.parametrize("call", CALLS, ids=repr)


def modules():
    return [import_module(f"mesp_np.ops.{found.name}") for found in pkgutil.iter_modules(mesp_np.ops.__path__)]


@every_call
def test_phantom(call):
    with Team() as team:
        op_checks.phantom(team, call)


@every_call
def test_hidden_memory(team, dtype, call):
    op_checks.hidden_memory(team, call, dtype)


@every_call
def test_what_was_in_an_output(team, dtype, call):
    """Garbage in an output that is written does not matter; an output that is added to keeps what it had."""
    results = []
    for poison, start in ((np.nan, 0), (7, 1)):
        arrays = call.arrays(np.ones, dtype)
        for name in call.writes:
            arrays[name][...] = poison if arrays[name].dtype.kind == "f" else int(start)
        for name in call.adds:
            arrays[name][...] = start
        call(team, arrays)
        results.append(arrays)
    for name in set(call.writes) - {"scratch"}:
        op_checks.same_bits(results[0][name], results[1][name])
    for name in call.adds:
        np.testing.assert_allclose(results[1][name] - results[0][name], 1, rtol=2e-3)


def test_every_public_function_is_listed():
    takes_a_team = {function for module in modules() for _, function in inspect.getmembers(module, inspect.isfunction)
                    if next(iter(inspect.signature(function).parameters), "") == "team"
                    and not function.__name__.startswith("_")}
    assert takes_a_team == {call.op for call in CALLS} | {mesp_np.ops.matmul.lend}


@every_call
def test_kernels_keep_the_dtype(team, dtype, call):
    """In every signature compiled so far, floats are of one dtype and nothing else is returned."""
    call(team, call.arrays(np.ones, dtype))
    for kernel in vars(import_module(call.op.__module__)).values():
        name = kernel.__name__ if isinstance(kernel, mesp_np.ops.kernel) and kernel.compiled else ""
        for signature in kernel.compiled.nopython_signatures if name else []:
            floats = {str(getattr(kind, "dtype", kind)) for kind in signature.args} & {"float32", "float64"}
            assert len(floats) <= 1 or name in FLOAT64_ARGUMENTS, (name, signature)
            result = "uint32" if name in BITS else "float64" if name in FLOAT64_RESULTS else "none"
            returned = str(getattr(signature.return_type, "dtype", signature.return_type))
            assert returned in floats | {result}, (name, signature)
