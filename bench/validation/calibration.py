"""The figures of the target table that follow from published rows: how, and from which.

    oombench validate --derive

derives them anew and prints them beside the table's. Rows in SOURCES are reproduced by construction; every other row
tests the table. Each derivation runs the row's step on a card without the costs that it does not ask about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf

import bench.vgpu as vgpu
from bench.validation import layers
from bench.validation.lm_step import Costs, Step, costs
from bench.validation.measuring import seconds
from bench.validation.published import published_rows
from bench.vgpu import Target

VIEW_S = 1e-6
"""What an operator without a kernel costs the host. The rows leave anything up to 2 us within 5 % of both phases."""

SOURCES: Mapping[str, tuple[str, ...]] = {
    "rtx4090 attained_gb_s": ("decoder_lm_small_ctx1024_optimizer_ms", "decoder_lm_medium_ctx512_optimizer_ms"),
    "rtx4090 matmul_tflop_s fp32": ("decoder_lm_medium_ctx512_forward_ms",),
    "rtx4090 matmul_tflop_s bf16": ("llama_mlp_geglu_t16384_forward_ms",),
    "rtx4090 host_us launch": ("decoder_lm_small_ctx256_forward_ms", "decoder_lm_small_ctx256_backward_ms"),
    "h100 host_us launch": ("decoder_lm_small_bf16_h100_step_ms",),
}
"""Figure of the table -> rows that it comes from."""

SOURCE_ROWS = frozenset(row for rows in SOURCES.values() for row in rows)


def _published_s(row_id: str) -> float:
    return next(row.value for row in published_rows() if row.id == row_id) * 1e-3


def _published(figure: str) -> list[float]:
    return [_published_s(row_id) for row_id in SOURCES[figure]]


def _without_host(target: Target) -> Target:
    return replace(target, launch_s=0.0, view_s=0.0)


def _host_alone(target: Target, launch_s: float, view_s: float) -> Target:
    """The card does everything in no time, so that a phase lasts as long as the host is busy with it."""
    rates = dict.fromkeys(target.matmul_flops_s, inf)
    return replace(target, attained_bytes_s=inf, matmul_flops_s=rates, launch_s=launch_s, view_s=view_s)


def attained_bytes_s(target: Target) -> float:
    """Bandwidth: what AdamW moves more for the larger model, by how much longer it takes."""
    small, medium = _published("rtx4090 attained_gb_s")
    steps = (Step("small", 1024), Step("medium", 512))
    modelled = [costs(_without_host(target), (2, 11), step).seconds["optimizer"] for step in steps]
    return target.attained_bytes_s * (modelled[1] - modelled[0]) / (medium - small)


def float32_flops_s(target: Target) -> float:
    """Products in float32: those of a forward, by the time that its memory traffic leaves."""
    (published,) = _published("rtx4090 matmul_tflop_s fp32")
    card = _without_host(target)

    def forward_s(card: Target) -> float:
        return costs(card, (2, 11), Step("medium", 512)).seconds["forward"]

    return _rate(card, "fp32", published, forward_s(card), forward_s(_at_rate(card, "fp32", inf)))


def bfloat16_flops_s(target: Target) -> float:
    """Products in bfloat16: those of the largest MLP's forward, by the time that its memory traffic leaves."""
    (published,) = _published("rtx4090 matmul_tflop_s bf16")
    card = _without_host(target)

    def forward_s(card: Target) -> float:
        with vgpu.virtual_gpu(card, (2, 9)):
            return layers.run("llama_mlp_geglu", 16384, "forward", seconds)

    return _rate(card, "bf16", published, forward_s(card), forward_s(_at_rate(card, "bf16", inf)))


def _at_rate(target: Target, kind: str, flops_s: float) -> Target:
    return replace(target, matmul_flops_s={**target.matmul_flops_s, kind: flops_s})


def _rate(target: Target, kind: str, published_s: float, modelled_s: float, traffic_s: float) -> float:
    return target.matmul_flops_s[kind] * (modelled_s - traffic_s) / (published_s - traffic_s)


def rtx4090_launch_s(target: Target) -> float:
    """The host's cost of a launch: the mean over forward and backward of a step that is too small to fill the card."""
    launches, views = _operators(target, (2, 11), Step("small", 256))
    phases = zip(("forward", "backward"), _published("rtx4090 host_us launch"), strict=True)
    found = [(published - views[phase] * VIEW_S) / launches[phase] for phase, published in phases]
    return sum(found) / len(found)


def h100_launch_s(target: Target) -> float:
    """The same from a whole step under autocast, which leaves the H100 idle most of the time."""
    (published,) = _published("h100 host_us launch")
    launches, views = _operators(target, (2, 5), Step("small", 512, walking=True, autocast=True))
    return (published - sum(views.values()) * VIEW_S) / sum(launches.values())


def _operators(target: Target, release: tuple[int, int], step: Step) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Operators that launch, and operators that do not, by phase."""

    def run(launch_s: float, view_s: float) -> Costs:
        return costs(_host_alone(target, launch_s, view_s), release, step)

    return run(1.0, 0.0).seconds, run(0.0, 1.0).seconds


def derive() -> dict[str, tuple[float, float]]:
    """Figure -> as derived, and as the table has it; in the table's units."""
    rtx4090, h100 = vgpu.find_target("rtx4090"), vgpu.find_target("h100")
    return {
        "rtx4090 attained_gb_s": (attained_bytes_s(rtx4090) / 1e9, rtx4090.attained_bytes_s / 1e9),
        "rtx4090 matmul_tflop_s fp32": (float32_flops_s(rtx4090) / 1e12, rtx4090.matmul_flops_s["fp32"] / 1e12),
        "rtx4090 matmul_tflop_s bf16": (bfloat16_flops_s(rtx4090) / 1e12, rtx4090.matmul_flops_s["bf16"] / 1e12),
        "rtx4090 host_us launch": (rtx4090_launch_s(rtx4090) * 1e6, rtx4090.launch_s * 1e6),
        "h100 host_us launch": (h100_launch_s(h100) * 1e6, h100.launch_s * 1e6),
    }
