"""No part of a step that is ours makes the host wait for the device.

Reading a tensor's value does on a GPU. Here every operation of whole steps is watched:
what reads one, or whose result has a size that only the values know, and who asked.
`test_runner.test_nothing_in_the_step_waits_for_the_device` reads the source for calls
that bypass operations (`tolist`, `numpy`).
"""

import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import serving
from serving.engine.gpu import verification as verification_v2
from tests.engine.checks import complete, draw_prompts, greedy
from tests.gpu_adapter.interpreted.engines import run_interpreted

OURS = Path(serving.__file__).parents[1]

READS = {
    torch.ops.aten.item.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.repeat_interleave.Tensor,
}


class Watch(TorchDispatchMode):
    """Notes which functions of ours read values."""

    def __init__(self):
        super().__init__()
        self.num_operations = 0
        self.places = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        if (func in READS or has_mask(func, args)) and (place := find_reader()):
            self.places.add(place)
        return func(*args, **(kwargs or {}))


def has_mask(func, args):
    """Whether this is an index with a mask: how many rows it takes, only it knows."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return any(one is not None and one.dtype == torch.bool for one in args[1])


def find_reader():
    """Return the function that asked, if the nearest outside of torch is ours."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts:
            is_ours = path.is_relative_to(OURS / "serving") or path.is_relative_to(
                OURS / "policies"
            )
            return f"{path.stem}.{frame.f_code.co_name}" if is_ours else None
        frame = frame.f_back
    return None


@contextmanager
def watch_steps(engine):
    """Watch what the runner does from a step's schedule to its last draft."""
    watch = Watch()
    runner = engine.runner
    execute, sample = runner.execute_model, runner.sample_tokens

    def watched(method):
        def call(*args, **kwargs):
            with watch:
                return method(*args, **kwargs)

        return call

    runner.execute_model, runner.sample_tokens = watched(execute), watched(sample)
    try:
        yield watch
    finally:
        del runner.execute_model, runner.sample_tokens


def run_steps(pair):
    with (
        run_interpreted(*pair, policy="tetris") as engine,
        watch_steps(engine) as watch,
    ):
        complete(engine, draw_prompts(4), greedy(16))
    assert watch.num_operations > 1000
    return watch


def test_no_step_reads_a_value(pair):
    assert run_steps(pair).places == set()


def test_a_step_that_does_is_found(pair, monkeypatch):
    write_totals = verification_v2._write_totals

    def write_and_read(lengths, out):
        write_totals(lengths, out)
        assert int(out[-1]) >= 0

    code = write_and_read.__code__
    monkeypatch.setattr(
        write_and_read,
        "__code__",
        code.replace(co_filename=verification_v2.__file__),
        raising=True,
    )
    monkeypatch.setattr(verification_v2, "_write_totals", write_and_read)
    assert run_steps(pair).places == {"verification.write_and_read"}
