"""The third post's run: LSTM, additive attention, beam 64 on a K80, as its author logged it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable

import workloads.seq2seq_beam
from bench.cell import run_cell
from bench.config import Cell, Steps
from bench.record import Status

MakeCell = Callable[..., Cell]


def test_it_fails_in_the_attention_sum(cell: MakeCell) -> None:
    record = run_cell(cell("seq2seq_beam", "thread", "k80"))
    assert record.status is Status.OOM
    assert record.reason is not None
    assert "Tried to allocate 944.00 MiB" in record.reason
    assert "total capacity of 11.17 GiB" in record.reason
    found = re.search(r"aten\.add\.Tensor at workloads/seq2seq_beam\.py:(\d+) in forward", record.reason)
    assert found is not None, record.reason
    source = inspect.getsource(workloads.seq2seq_beam).splitlines()
    assert "query.unsqueeze(1) + intermediate" in source[int(found[1]) - 1]
    assert record.first is not None
    assert 9 * 2**30 < record.first.allocated_bytes < 11 * 2**30  # the post: 9.86 GiB


def test_two_samples_fit_and_memory_grows_linearly(cell: MakeCell) -> None:
    rows: list[tuple[int, str, int, int, int]] = []
    steps = Steps(memory=2, timed=1)
    record = run_cell(cell("seq2seq_beam", "logged", "k80", steps=steps), lambda *row: rows.append(row))
    assert record.status is Status.OK
    allocated = [[row[3] for row in rows if row[:2] == (step, "decoder step")] for step in (0, 1)]
    growth = [after - before for before, after in zip(allocated[0][2:], allocated[0][3:], strict=False)]
    assert len(growth) == 47
    assert max(growth) - min(growth) < 0.02 * max(growth)  # one line, up to the rounding of blocks
    assert 120e6 < growth[0] < 135e6  # the post's first iteration: 127.9 MB a step
    # The base grows by gradients and two Adam moments: 3 x 13,645,312 x 4 bytes; and by the backward's workspace.
    base = allocated[1][0] - allocated[0][0]
    states = 3 * 13_645_312 * 4
    assert states + 8_519_680 <= base < 1.02 * states + 8_519_680
