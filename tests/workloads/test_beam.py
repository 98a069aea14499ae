"""Beam search against brute force and against teacher forcing, in float64 on models small enough to enumerate."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from workloads.beam import State, beam_search, follow_back_pointers

END = 0


class Recurrent:
    """A recurrent model of random weights whose next token depends on all tokens before it."""

    def __init__(self, vocabulary: int, hidden: int = 5, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def weights(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).requires_grad_()

        self.embedding, self.recurrence, self.output = (
            weights(vocabulary, hidden),
            weights(hidden, hidden),
            weights(hidden, vocabulary),
        )
        self.rows: list[int] = []

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.embedding, self.recurrence, self.output

    def __call__(self, tokens: Tensor, state: State) -> tuple[Tensor, State]:
        self.rows.append(tokens.shape[0])
        hidden = torch.tanh(state[0] @ self.recurrence + self.embedding[tokens])
        return (hidden @ self.output).log_softmax(dim=1), (hidden,)

    def score(self, start: int, hidden: Tensor, sequence: list[int]) -> Tensor:
        """Teacher-forced log-probability of `sequence` up to its first END."""
        total, previous, state = torch.zeros((), dtype=torch.float64), start, (hidden.unsqueeze(0),)
        for token in sequence:
            log_probs, state = self(torch.tensor([previous]), state)
            total = total + log_probs[0, token]
            previous = token
            if token == END:
                break
        return total


@pytest.fixture(autouse=True)
def _double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def start_of(batch: int, hidden: int = 5) -> tuple[State, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (torch.randn(batch, hidden, generator=generator),), torch.full((batch,), END)


def finished_sequences(vocabulary: int, steps: int) -> list[list[int]]:
    """Every sequence of `steps` tokens in which only END follows END."""
    every = product(range(vocabulary), repeat=steps)
    return [list(s) for s in every if all(b == END for a, b in pairwise(s) if a == END)]


def test_a_wide_beam_finds_what_brute_force_finds():
    model = Recurrent(vocabulary=4)
    state, start = start_of(batch=2)
    sequences = finished_sequences(vocabulary=4, steps=3)
    assert len(sequences) == 40
    found = beam_search(model, state, start, beam=40, steps=3, end=END)
    for sample in range(2):
        scores = torch.stack([model.score(END, state[0][sample], sequence) for sequence in sequences])
        best, order = scores.sort(descending=True)
        torch.testing.assert_close(found.log_probability[sample], best)
        assert found.tokens[sample].tolist() == [sequences[index] for index in order.tolist()]
        torch.testing.assert_close(best.exp().sum(), torch.tensor(1.0))


def test_a_beam_as_wide_as_the_vocabulary_is_exact_for_two_steps():
    model = Recurrent(vocabulary=9)
    state, start = start_of(batch=3)
    sequences = finished_sequences(vocabulary=9, steps=2)
    found = beam_search(model, state, start, beam=9, steps=2, end=END)
    for sample in range(3):
        scores = torch.stack([model.score(END, state[0][sample], sequence) for sequence in sequences])
        best, order = scores.topk(9)
        torch.testing.assert_close(found.log_probability[sample], best)
        assert found.tokens[sample].tolist() == [sequences[index] for index in order.tolist()]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_log_probabilities_and_their_gradients_are_those_of_teacher_forcing(seed):
    model = Recurrent(vocabulary=6, seed=seed)
    state, start = start_of(batch=3)
    found = beam_search(model, state, start, beam=4, steps=6, end=END)
    forced = torch.stack(
        [
            torch.stack([model.score(END, state[0][sample], sequence) for sequence in beam])
            for sample, beam in enumerate(found.tokens.tolist())
        ]
    )
    torch.testing.assert_close(found.log_probability, forced)
    weights = torch.linspace(-1, 1, forced.numel()).view_as(forced)
    from_search = torch.autograd.grad((weights * found.log_probability).sum(), model.parameters)
    from_forcing = torch.autograd.grad((weights * forced).sum(), model.parameters)
    torch.testing.assert_close(from_search, from_forcing)


def test_hypotheses_are_ordered_distinct_and_stay_finished():
    model = Recurrent(vocabulary=6)
    state, start = start_of(batch=4)
    found = beam_search(model, state, start, beam=6, steps=8, end=END)
    assert found.tokens.shape == (4, 6, 8)
    assert (found.log_probability.diff(dim=1) <= 0).all()
    finished = (found.tokens == END).int()
    assert (finished.diff(dim=2) >= 0).all()
    assert finished.any()
    for beam in found.tokens.tolist():
        assert len({tuple(sequence) for sequence in beam}) == 6


def test_the_first_step_has_one_hypothesis_per_sample_and_no_step_is_left_out():
    model = Recurrent(vocabulary=6)
    model.output.data[:, END] += 100  # every hypothesis wants to finish at once
    state, start = start_of(batch=2)
    beam_search(model, state, start, beam=5, steps=4, end=END)
    assert model.rows == [2, 10, 10, 10]


def test_a_sample_is_searched_alike_alone_and_in_a_batch():
    model = Recurrent(vocabulary=6)
    (hidden,), start = start_of(batch=4)
    together = beam_search(model, (hidden,), start, beam=5, steps=5, end=END)
    for sample in range(4):
        alone = beam_search(model, (hidden[sample : sample + 1],), start[:1], beam=5, steps=5, end=END)
        assert torch.equal(alone.tokens[0], together.tokens[sample])
        torch.testing.assert_close(alone.log_probability[0], together.log_probability[sample])


def test_back_pointers_are_followed_from_the_last_step():
    chosen = [torch.tensor([[3, 4]]), torch.tensor([[5, 6]]), torch.tensor([[7, 8]])]
    back_pointers = [torch.tensor([[0, 0]]), torch.tensor([[1, 0]]), torch.tensor([[0, 0]])]
    assert follow_back_pointers(chosen, back_pointers).tolist() == [[[4, 5, 7], [4, 5, 8]]]
