"""The seq2seq step: its sizes are the thread's, its gradient is REINFORCE's, its memory grows as stated, it learns."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from workloads.docstrings import END
from workloads.seq2seq_beam import AdditiveAttention, MicroBatch, Seq2SeqBeam, Seq2SeqSettings, reinforce_loss

CPU = torch.device("cpu")
MIB = 2**20
SMALL = Seq2SeqSettings(
    batch_size=4, beam=5, max_steps=4, source_length=11, hidden=7, embedding=6, vocab_size=60, seed=1
)


@pytest.fixture
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def built(settings: Seq2SeqSettings = SMALL) -> Seq2SeqBeam:
    workload = Seq2SeqBeam(settings)
    workload.place(CPU)
    return workload


def gradients(settings: Seq2SeqSettings, count: int) -> dict[str, Tensor]:
    workload = built(settings)
    for micro_batch in workload.micro_batches(count):
        for loss in workload.losses(micro_batch):
            (loss / count).backward()
    return {name: parameter.grad for name, parameter in workload.model.named_parameters()}


def forward(workload: Seq2SeqBeam, micro_batch: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and log-probabilities of the hypotheses, and reward minus baseline of each."""
    tokens, log_probability = workload.model(micro_batch.source)
    rewards = torch.from_numpy(workload.rewards(tokens.tolist(), micro_batch.references))
    return tokens, log_probability, rewards - rewards.mean(dim=1, keepdim=True)


# Sizes


def test_the_default_preset_has_the_size_of_the_thread():
    assert next(iter(Seq2SeqBeam.presets)) == "thread"
    settings = Seq2SeqBeam.presets["thread"]
    assert (settings.batch_size, settings.beam, settings.max_steps, settings.hidden) == (16, 64, 50, 512)
    assert settings.batch_size * settings.beam * settings.source_length * settings.hidden * 4 == 944 * MIB
    workload = Seq2SeqBeam(settings)
    parameters = sum(parameter.numel() for parameter in workload.model.parameters())
    assert parameters == 13_645_312
    assert 3 * parameters * 4 / MIB == pytest.approx(214 - 58, abs=0.5)  # gradient and two moments, in the log


def test_the_logged_preset_differs_in_the_rows_alone():
    thread, logged = Seq2SeqBeam.presets["thread"], Seq2SeqBeam.presets["logged"]
    assert logged == replace(thread, batch_size=2, beam=32)


def test_a_micro_batch_has_the_shapes_of_the_settings_whatever_the_text():
    workload = built()
    assert workload.items_per_step == 4
    assert workload.unit == "samples"
    for count, size in ((1, 4), (2, 2), (4, 1)):
        slices = list(workload.micro_batches(count))
        assert [tuple(one.source.shape) for one in slices] == [(size, 11)] * count
        assert all(len(one.references) == size for one in slices)


def test_the_batches_follow_the_seed():
    def first_three(seed: int) -> list[str]:
        workload = built(replace(SMALL, seed=seed))
        return [one.references[0] for _ in range(3) for one in islice(workload.micro_batches(1), 1)]

    assert first_three(1) == first_three(1)
    assert first_three(1) != first_three(2)
    assert len(set(first_three(1))) == 3


def test_a_count_that_does_not_divide_the_batch_is_refused():
    with pytest.raises(ValueError, match="a batch of 4 has no 3 equal slices"):
        next(built().micro_batches(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sharing": "some"}, "not 'some'"),
        ({"sharing": "shared"}, "embedding == hidden, not 6 and 7"),
        ({"beam": 61}, "cannot fill a beam of 61"),
    ],
)
def test_settings_that_cannot_be_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_shared_weights_are_one_parameter_before_and_after_an_update():
    settings = replace(SMALL, embedding=7, sharing="shared")
    workload = built(settings)
    separate = sum(parameter.numel() for parameter in built(replace(settings, sharing="separate")).model.parameters())
    assert separate - sum(parameter.numel() for parameter in workload.model.parameters()) == 2 * 60 * 7
    (micro_batch,) = workload.micro_batches(1)
    for loss in workload.losses(micro_batch):
        loss.backward()
    workload.optimizers()["model"].step()
    assert workload.model.encoder.embedding.weight is workload.model.decoder.project.weight
    assert workload.model.encoder.embedding.weight is workload.model.decoder.embedding.weight


def test_the_weights_follow_the_seed():
    first, again, other = built(), built(), built(replace(SMALL, seed=2))
    assert all(map(torch.equal, first.model.parameters(), again.model.parameters()))
    assert not any(map(torch.equal, first.model.parameters(), other.model.parameters()))


def test_the_hooks_name_parts_of_the_model():
    workload = built()
    model = workload.model
    assert workload.networks == {"model": model}
    assert list(workload.blocks()) == [model.decoder.attention]
    assert workload.phases() == {"decoder step": model.decoder}
    assert list(workload.shards()) == [model.encoder, model.decoder, model]
    assert len(list(built(replace(SMALL, embedding=7, sharing="shared")).shards())) == 1


# Objective


@pytest.mark.usefixtures("double")
def test_attention_is_the_additive_formula_over_source_tokens_only():
    generator = torch.Generator().manual_seed(0)
    attention = AdditiveAttention(3)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    state, memory = torch.randn(4, 3, generator=generator), torch.randn(2, 5, 3, generator=generator)
    mask = torch.tensor([[False, False, True, True, True], [True] * 5])
    samples = torch.tensor([0, 0, 1, 1])
    for row, attended in enumerate(attention(state, memory, mask, samples)):
        outputs = memory[samples[row]][mask[samples[row]]]
        scores = torch.stack(
            [
                attention.v_vector @ torch.tanh(state[row] @ attention.w_matrix + output @ attention.u_matrix)
                for output in outputs
            ]
        )
        torch.testing.assert_close(attended, scores.softmax(dim=0) @ outputs)


def test_the_reward_is_one_for_the_reference_and_zero_for_nothing():
    workload = built(replace(SMALL, vocab_size=5120))
    (micro_batch,) = islice(workload.micro_batches(4), 1)
    words = micro_batch.references[0].split()
    tokens = [workload._vocabulary.token(word) for word in words]
    beam = [[*tokens, END], [END, *tokens], tokens[: len(tokens) // 2]]
    right, empty, half = workload.rewards([beam], micro_batch.references)[0]
    assert (right, empty) == (pytest.approx(1), 0)
    assert 0 < half < 1


@pytest.mark.usefixtures("double")
def test_a_hypothesis_scores_what_the_decoder_gives_its_tokens():
    workload = built()
    (micro_batch,) = workload.micro_batches(1)
    tokens, log_probability, _ = forward(workload, micro_batch)
    torch.testing.assert_close(log_probability, teacher_forced(workload, micro_batch, tokens)[0])


@pytest.mark.usefixtures("double")
def test_the_gradient_is_the_one_that_reinforce_has_by_hand():
    """Of the output bias: minus the mean over samples of sum of advantage x (chosen token - probabilities)."""
    workload = built()
    (micro_batch,) = workload.micro_batches(1)
    tokens, _, advantage = forward(workload, micro_batch)
    assert advantage.abs().sum() > 0
    for loss in workload.losses(micro_batch):
        loss.backward()
    _, scores = teacher_forced(workload, micro_batch, tokens)
    expected = -(advantage[..., None] * scores).sum(dim=1).mean(dim=0)
    torch.testing.assert_close(workload.model.decoder.project.bias.grad, expected)


def teacher_forced(workload: Seq2SeqBeam, micro_batch: MicroBatch, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of given hypotheses: log-probability [samples, beam], and its derivative by the output bias [.., vocabulary]."""
    decoder = workload.model.decoder
    samples, beam, steps = tokens.shape
    with torch.no_grad():
        memory, hidden, cell = workload.model.encoder(micro_batch.source)
        rows = torch.arange(samples).repeat_interleave(beam)
        state = (hidden[rows], cell[rows], rows)
        previous, live = torch.full_like(rows, END), torch.ones(samples * beam)
        total, scores = torch.zeros(samples * beam), torch.zeros(samples * beam, workload.settings.vocab_size)
        for index in range(steps):
            log_probs, state = decoder(previous, state, memory, micro_batch.source != END)
            previous = tokens[:, :, index].flatten()
            total += live * log_probs.gather(1, previous[:, None])[:, 0]
            chosen = torch.nn.functional.one_hot(previous, workload.settings.vocab_size)
            scores += live[:, None] * (chosen - log_probs.exp())
            live = live * (previous != END)
    return total.view(samples, beam), scores.view(samples, beam, -1)


@pytest.mark.usefixtures("double")
def test_the_gradient_agrees_with_finite_differences():
    workload = built()
    (micro_batch,) = workload.micro_batches(1)
    tokens, _, advantage = forward(workload, micro_batch)
    for loss in workload.losses(micro_batch):
        loss.backward()
    generator = torch.Generator().manual_seed(0)
    for parameter in workload.model.parameters():
        direction = torch.randn(parameter.shape, generator=generator)
        values = []
        for step in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.add_(direction, alpha=step)
                moved, log_probability = workload.model(micro_batch.source)
                parameter.sub_(direction, alpha=step)
            assert torch.equal(moved, tokens)
            values.append(reinforce_loss(log_probability, advantage))
        torch.testing.assert_close(
            (values[0] - values[1]) / 2e-6, (parameter.grad * direction).sum(), rtol=1e-5, atol=1e-9
        )


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("count", [2, 4])
def test_accumulated_gradients_are_those_of_the_whole_batch(count):
    torch.testing.assert_close(gradients(SMALL, count), gradients(SMALL, 1), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_gives_a_finite_gradient(dtype):
    workload = built()
    (micro_batch,) = workload.micro_batches(1)
    with torch.autocast("cpu", dtype):
        (loss,) = workload.losses(micro_batch)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())


def test_a_step_reads_no_value_of_a_tensor_but_the_tokens(monkeypatch):
    """Shapes alone are enough for a whole step, with zeros where the tokens come back to the host."""
    monkeypatch.setattr(FakeTensor, "tolist", lambda fake: np.zeros(tuple(fake.shape), dtype=int).tolist())
    with FakeTensorMode():
        workload = Seq2SeqBeam(SMALL)
        optimizer = workload.optimizers()["model"]
        for micro_batch in workload.micro_batches(2):
            for loss in workload.losses(micro_batch):
                loss.backward()
        optimizer.step()
    assert loss.shape == ()
    assert workload.reward == 0


# Memory


def attended_bytes(settings: Seq2SeqSettings) -> int:
    """Bytes of one tensor [rows, source, hidden] after the first step, in float32."""
    return settings.batch_size * settings.beam * settings.source_length * settings.hidden * 4


def kept_per_step(workload: Seq2SeqBeam) -> float:
    """Tensors [rows, source, hidden] that autograd keeps, per decoding step after the first."""
    kept: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() == attended_bytes(workload.settings):
            kept[storage.data_ptr()] = storage
        return tensor

    (micro_batch,) = workload.micro_batches(1)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        (loss,) = workload.losses(micro_batch)
    assert loss.requires_grad
    return len(kept) / (workload.settings.max_steps - 1)


def test_a_step_keeps_the_selected_encoder_outputs_and_the_tanh():
    assert kept_per_step(built()) == 2


def test_with_the_attention_recomputed_a_step_keeps_neither():
    workload = built()
    for block in workload.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    assert kept_per_step(workload) == 0


class Large(TorchDispatchMode):
    """Operators that allocate a tensor of `size` bytes, each with how many of them are alive after it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.alive: set[int] = set()
        self.log: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storage = result.untyped_storage() if isinstance(result, Tensor) else None
        if storage is not None and storage.nbytes() == self.size and storage.data_ptr() not in self.alive:
            self.alive.add(storage.data_ptr())
            weakref.finalize(storage, self.alive.discard, storage.data_ptr())
            self.log.append((func.overloadpacket.__name__, len(self.alive)))
        return result


def test_the_attention_sum_is_the_first_to_need_a_new_high():
    """Of each step after the first: so it is where a card that cannot hold one more of these tensors gives up."""
    workload = built()
    (micro_batch,) = workload.micro_batches(1)
    with Large(attended_bytes(SMALL)) as large:
        (loss,) = workload.losses(micro_batch)
    assert loss.requires_grad
    assert large.log == [
        (operator, kept + more)
        for kept in (0, 2, 4)
        for operator, more in (("index_select", 1), ("mm", 2), ("add", 3), ("tanh", 3))
    ]


# Training


def test_it_learns():
    workload = built(Seq2SeqBeam.presets["tiny"])
    optimizer = workload.optimizers()["model"]
    rewards = []
    for _ in range(160):
        optimizer.zero_grad()
        for micro_batch in workload.micro_batches(2):
            for loss in workload.losses(micro_batch):
                (loss / 2).backward()
        optimizer.step()
        workload.finish_step()
        rewards.append(workload.reward)
    before, after = sum(rewards[:5]) / 5, sum(rewards[-20:]) / 20
    assert after > max(0.1, 1.5 * before)
