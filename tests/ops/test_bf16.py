"""Products of rounded numbers: the rounding, the plain back end, pairs by hand, and the instruction itself."""

import llvmlite.binding as llvm
import numpy as np
import pytest
from llvmlite import ir
from numba.core import types
from numba.core.registry import cpu_target

from mesp_np.config import RunConfig
from mesp_np.errors import UsageError
from mesp_np.generate import generator
from mesp_np.gradcheck import equipped_team
from mesp_np.ops import bf16, linear, lora, matmul, micro, vectors
from mesp_np.ops.matmul import BLOCK, DEPTH, ROWS, multiply
from mesp_np.ops.quant import from_bf16, round_bf16
from tests import op_checks, small
from tests.ops.test_matmul import STORES, in_dtype
from tests.test_bits import different, gradients

SHAPES = [(7, 33, 5), (1, 1, 1), (13, 2, 70), (ROWS + 3, 40, 130), (5, DEPTH + 33, 17), (6, 2 * DEPTH, 64)]


@pytest.fixture(scope="module")
def team():
    with equipped_team(threads=2, dtype=np.float32, compute="bf16") as team:
        yield team


def rounded(x):
    """A copy, in numbers that bfloat16 has."""
    return from_bf16(round_bf16(x))


@pytest.fixture(params=[bf16.PLAIN, bf16.PAIRS, bf16.TILES])
def back_end(monkeypatch, request):
    """Each back end; where the CPU has not its instruction, by hand."""
    vectors.tiles_allowed()                                  # the system is asked, as the real function does
    monkeypatch.setattr(bf16, "backend", lambda: request.param)
    return request.param


def test_kernels_round_as_the_reference_does(rng):
    special = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0x7F7FFFFF, 0x3F808000, 0x3F818000,
                        0x80008000, 1], np.uint32).view(np.float32)
    for x in [*special, *rng.standard_normal(1000).astype(np.float32)]:
        ours, expected = np.float32(bf16.rounded(x)), rounded(np.array([x]))[0]
        assert ours == expected or np.isnan(ours) and np.isnan(expected)
    assert bf16.pair(np.float32(1), np.float32(-2)) == 0xC0003F80


@pytest.mark.parametrize("M, K, N", SHAPES)
@pytest.mark.parametrize("add", [False, True])
def test_the_plain_back_end_is_the_product_of_what_was_rounded_before(team, rng, monkeypatch, M, K, N, add):
    monkeypatch.setattr(bf16, "backend", lambda: bf16.PLAIN)
    a, b, base = op_checks.normal(rng, np.float32, (M, K), (K, N), (M, N))
    ours, expected = base.copy(), base.copy()
    multiply(team, ours, a, b, add=add, rounded=True)
    multiply(team, expected, rounded(a), rounded(b), add=add)
    op_checks.same_bits(ours, expected)


@pytest.mark.parametrize("M, K, N", SHAPES)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_every_back_end_gives_the_product_of_rounded_numbers(team, rng, back_end, M, K, N, turned, add):
    """Every edge, an odd last number without a partner, both orientations of both factors."""
    a, b, base = op_checks.normal(rng, np.float32, (M, K), (K, N), (M, N))
    left, right = (np.asfortranarray(a), np.asfortranarray(b)) if turned else (a, b)
    out = base.copy()
    multiply(team, out, left, right, add=add, rounded=True)
    exact = rounded(a).astype(np.float64) @ rounded(b) + add * base
    op_checks.close(out, exact)


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("transpose", [False, True])
def test_a_stored_weight_gives_the_bits_of_the_dense_one(team, rng, store, transpose, back_end):
    stored = store(rng.standard_normal((70, 1216)).astype(np.float32))
    whole = in_dtype(stored, np.float32)
    if transpose:
        stored, whole = stored.T, whole.T
    a, lazy, dense = op_checks.normal(rng, np.float32, (7, len(stored)), *2 * [(7, stored.shape[1])])
    multiply(team, lazy, a, stored, rounded=True)
    multiply(team, dense, a, whole, rounded=True)
    op_checks.same_bits(lazy, dense)


def test_a_row_has_the_same_bits_whatever_rows_are_beside_it(team, rng, back_end):
    a, b = op_checks.normal(rng, np.float32, (ROWS + 9, 601), (601, 70))
    whole, part = np.empty((2, len(a), 70), np.float32)
    multiply(team, whole, a, b, rounded=True)
    for i in range(0, len(a), 50):
        multiply(team, part[i:i + 50], a[i:i + 50], b, rounded=True)
    op_checks.same_bits(part, whole)


def test_large_products_are_rounded_and_those_with_the_rank_are_not(team, rng):
    x, dout, weight, A, B = op_checks.normal(rng, np.float32, (9, 40), (9, 24), (24, 40), (4, 40), (24, 4))
    out, dx, dweight, h, dh, dA, dB = (np.zeros(shape, np.float32) for shape in (
        (9, 24), (9, 40), (24, 40), (9, 4), (9, 4), (4, 40), (24, 4)))
    lora.project(team, h, x, A)
    lora.backward_hidden(team, dh, dout, B, 2.0)
    lora.backward_params(team, dA, dB, dh, dout, x, h, 2.0)
    linear.forward(team, out, x, weight, plus=lora.added(h, B, 2.0))
    linear.backward_input(team, dx, dout, weight, plus=lora.backward_added(dh, A))
    linear.backward_weight(team, dweight, dout, x)
    op_checks.close(out, rounded(x).astype(np.float64) @ rounded(weight).T + 2.0 * h @ B.T.astype(np.float64))
    op_checks.close(dx, rounded(dout).astype(np.float64) @ rounded(weight) + dh @ A.astype(np.float64))
    op_checks.close(dweight, rounded(dout).T.astype(np.float64) @ rounded(x))
    op_checks.close(h, x.astype(np.float64) @ A.T)
    op_checks.close(dh, 2.0 * dout.astype(np.float64) @ B)
    op_checks.close(dA, dh.T.astype(np.float64) @ x)
    op_checks.close(dB, 2.0 * dout.T.astype(np.float64) @ h)


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_exact_methods_and_thread_counts_agree_to_the_bit(trainable):
    settings = dict(compute="bf16", trainable=trainable, stored="bf16")
    reference = gradients(method="store", **settings)
    for method in small.EXACT[1:]:
        assert different(gradients(method=method, threads=2, **settings), reference) == [], method
    assert different(gradients(method="store", trainable=trainable, stored="bf16"), reference) != []


def test_gradients_stay_near_the_full_ones():
    full, ours = (gradients(compute=compute, stored="bf16") for compute in ("full", "bf16"))
    for name, gradient in full.items():
        assert 0 < np.linalg.norm(ours[name] - gradient) < 0.15 * np.linalg.norm(gradient), name


def confident_gradients(loss):
    """Of a model with large logits, whose every target is the likeliest token."""
    config = small.model_config()
    with small.engine(config, compute="bf16", loss=loss) as engine:
        engine.model.params.head.value.setflags(write=True)
        engine.model.params.head.value *= 12
        ids = np.random.default_rng(0).integers(0, config.vocab_size, 13)
        source = generator(engine, len(ids))
        labels = [int(source.logits([token]).argmax()) for token in ids]
        return engine.loss(small.Batch.of([ids], [labels])), engine.gradients(small.Batch.of([ids], [labels]))


def test_a_confident_gradient_is_the_same_by_rows_and_by_vocabulary():
    """What is left of sum_v p_v W_v - W_label is small, so both must be of rounded weights."""
    (loss, by_rows), (_, by_vocabulary) = (confident_gradients(loss) for loss in ("rows:5", "vocab:10"))
    assert 0 < loss < 0.3
    for name, gradient in by_rows.items():
        assert np.linalg.norm(by_vocabulary[name] - gradient) < 0.05 * np.linalg.norm(gradient), name


def test_scratch_holds_what_a_run_needs():
    assert matmul.scratch_elements("bf16") - matmul.scratch_elements() == ROWS * DEPTH


def test_not_in_float64():
    with pytest.raises(UsageError, match="--compute bf16 cannot go with --dtype float64"):
        RunConfig(compute="bf16", dtype="float64")


@pytest.mark.parametrize("cpu", ["znver4", "cooperlake", "sapphirerapids"])
def test_the_instruction_is_assembled_for_a_cpu_that_has_it(monkeypatch, cpu):
    """A block as on a CPU with 512-bit vectors: 24 dot products a step, all their sums kept in registers."""
    lines = assembled(monkeypatch, cpu).splitlines()
    dots = [at for at, line in enumerate(lines) if "vdpbf16ps" in line]
    assert len(dots) >= BLOCK * 4 and all("zmm" in lines[at] for at in dots)
    assert not any("rsp" in line for line in lines[dots[0]:dots[-1]])


def assembled(monkeypatch, cpu):
    """The assembly of the sums of a block of pairs, made for another CPU than this one."""
    for name, value in (("VECTOR_BYTES", 64), ("VECTORS", 4)):
        monkeypatch.setattr(vectors, name, value)
        monkeypatch.setattr(micro, name, value)
    module, addresses = ir.Module(), [vectors.BYTE.as_pointer()] * 3
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [*addresses, vectors.INDEX, ir.IntType(1)]), "block")
    builder = ir.IRBuilder(function.append_basic_block())
    code = vectors.Code(cpu_target.target_context, builder, types.float32)
    out, a, panel, depth, add = function.args
    starts, corners = ([builder.gep(address, [vectors.INDEX(4096 * r)]) for r in range(BLOCK)] for address in (a, out))
    pairs_of_lanes = ir.VectorType(vectors.PLACE, code.lanes)
    sums = micro._sums(code, 4, starts, vectors.INDEX(4), panel, depth, pairs_of_lanes, micro._dot_pairs)
    micro._put(code, sums, corners, add, vectors.FLOAT(1))
    builder.ret_void()
    return optimised(module, cpu)


def optimised(module, cpu):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu=cpu, opt=3)
    made = llvm.parse_assembly(str(module))
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(3))
    passes.getModulePassManager().run(made, passes)
    return machine.emit_assembly(made)
