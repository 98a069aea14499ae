"""Beam search that keeps the autograd graph of every hypothesis.

Back-pointers are kept per step and followed once at the end for the tokens; the log-probabilities follow them inside
the search, through the gather that top-k is to autograd, so a loss on the result reaches every step that led to it.
No hypothesis ends the search early: the shapes depend on the arguments and on no value of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = tuple[Tensor, ...]
"""What a hypothesis carries from step to step: tensors [rows, ...], one row for each hypothesis."""

Step: TypeAlias = Callable[[Tensor, State], tuple[Tensor, State]]
"""(previous tokens [rows], state) -> (log-probabilities of the next token [rows, vocabulary], new state)."""


class Hypotheses(NamedTuple):
    """The hypotheses of a search, the most probable first.

    Attributes:
        tokens: [batch, beam, steps], integer; after a hypothesis's first `end`, only `end`.
        log_probability: [batch, beam], natural logarithm, with its graph: summed over the tokens to the first `end`.
    """

    tokens: Tensor
    log_probability: Tensor


def beam_search(step: Step, state: State, start: Tensor, beam: int, steps: int, end: int) -> Hypotheses:
    """The `beam` most probable continuations that a beam of that width finds in `steps` steps.

    The first step has one hypothesis per sample, later ones `beam` (fewer only while there are fewer continuations
    than that). A finished hypothesis is carried on by `end` with probability 1, in rows that cost what live ones cost.

    Args:
        step: One step of the decoder.
        state: State of the first step, [batch, ...] each.
        start: [batch], the token before the first.
        beam: Hypotheses per sample. More than the vocabulary has tokens can leave some with log-probability -inf.
        steps: Tokens per hypothesis.
        end: The token that finishes a hypothesis.
    """
    batch = start.shape[0]
    first_sample = torch.arange(batch, device=start.device).unsqueeze(1)
    scores, tokens = torch.zeros_like(start, dtype=torch.get_default_dtype()).unsqueeze(1), start
    chosen: list[Tensor] = []
    back_pointers: list[Tensor] = []
    for index in range(steps):
        width = scores.shape[1]
        log_probs, state = step(tokens, state)
        if index > 0:  # the start token may be `end` itself
            log_probs = carry_finished(log_probs, tokens == end, end)
        vocabulary = log_probs.shape[1]
        candidates = (scores.unsqueeze(2) + log_probs.view(batch, width, vocabulary)).view(batch, width * vocabulary)
        scores, best = candidates.topk(min(beam, width * vocabulary), dim=1)
        back_pointers.append(best // vocabulary)
        chosen.append(best % vocabulary)
        rows = (back_pointers[-1] + first_sample * width).flatten()
        state = tuple(part.index_select(0, rows) for part in state)
        tokens = chosen[-1].flatten()
    return Hypotheses(follow_back_pointers(chosen, back_pointers), scores)


def carry_finished(log_probs: Tensor, finished: Tensor, end: int) -> Tensor:
    """`log_probs` [rows, vocabulary], where a row of `finished` [rows] can go on with `end` only, at no cost."""
    only_end = torch.full_like(log_probs[0], -math.inf)
    only_end[end] = 0
    return torch.where(finished.unsqueeze(1), only_end, log_probs)


def follow_back_pointers(chosen: Sequence[Tensor], back_pointers: Sequence[Tensor]) -> Tensor:
    """Tokens [batch, beam, steps] of the hypotheses alive after the last step.

    Args:
        chosen: Per step, the token of each hypothesis, [batch, width].
        back_pointers: Per step, the hypothesis of the step before that each one continues, [batch, width].
    """
    pointer = torch.arange(chosen[-1].shape[1], device=chosen[-1].device).expand_as(chosen[-1])
    backwards = []
    for tokens, parents in zip(reversed(chosen), reversed(back_pointers), strict=True):
        backwards.append(tokens.gather(1, pointer))
        pointer = parents.gather(1, pointer)
    return torch.stack(backwards[::-1], dim=2)
