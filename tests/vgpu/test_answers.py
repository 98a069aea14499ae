"""What the card answers when a program asks for data: known values as they are, stand-ins where nobody knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.vgpu as vgpu
from bench.vgpu import stand_ins

ITEM = "aten._local_scalar_dense.default"


class TestKnown:
    """Integers, masks and single numbers that no data enter."""

    def test_lists_and_items(self, card: vgpu.Device) -> None:
        tensor = torch.tensor([3, 1, 2], device="vgpu")
        assert tensor.tolist() == [3, 1, 2]
        assert tensor[0].item() == 3
        assert int(tensor.sum()) == 6
        assert float(torch.tensor(2.5, device="vgpu")) == 2.5
        assert torch.tensor([1.5, 2.0], device="vgpu").tolist() == [1.5, 2.0]
        assert bool((tensor > 2).any())
        assert [int(each) for each in tensor] == [3, 1, 2]
        assert 3 in tensor
        assert not card.stand_ins

    def test_arrays(self, card: vgpu.Device) -> None:
        assert torch.arange(3, device="vgpu").cpu().numpy().tolist() == [0, 1, 2]
        assert np.asarray(torch.arange(3, device="vgpu").cpu()).tolist() == [0, 1, 2]
        assert not card.stand_ins

    def test_what_the_host_sent(self, card: vgpu.Device) -> None:
        assert torch.arange(3).to("vgpu").tolist() == [0, 1, 2]
        assert torch.from_numpy(np.array([5, 6])).to("vgpu").add(1).tolist() == [6, 7]
        assert torch.arange(6).view(2, 3)[:, 1:].to("vgpu").cpu().tolist() == [[1, 2], [4, 5]]

    def test_views_and_what_is_written_through_them(self, card: vgpu.Device) -> None:
        tensor = torch.zeros(4, dtype=torch.long, device="vgpu")
        view = tensor[1:3]
        view.add_(1)
        tensor[3] = 7
        assert tensor.tolist() == [0, 1, 1, 7]
        torch._foreach_add_([tensor], 1)
        torch.add(tensor, 1, out=tensor)
        assert view.tolist() == [3, 3]
        tensor[torch.tensor([0], device="vgpu")] = 5
        assert tensor[0] == 5

    def test_is_lost_when_data_are_written(self, card: vgpu.Device) -> None:
        tensor = torch.arange(4, device="vgpu")
        view = tensor[1:]
        view.add_(torch.randint(0, 9, (3,), device="vgpu"))
        assert tensor.tolist() == [0, 0, 0, 0]
        assert card.stand_ins == {"Tensor.tolist": 1}

    def test_numbers_are_lost_when_data_are_written(self, card: vgpu.Device) -> None:
        tensor = torch.tensor([1.5, 2.0], device="vgpu")
        tensor.mul_(2)
        assert tensor.tolist() == [3.0, 4.0]
        tensor[:1].mul_(torch.rand(1, device="vgpu"))
        assert tensor.tolist() == [0.0, 0.0]
        assert card.stand_ins == {"Tensor.tolist": 1}

    def test_comes_with_what_fills_a_tensor(self, card: vgpu.Device) -> None:
        tensor = torch.empty(3, dtype=torch.long, device="vgpu")
        view = tensor[:2]
        assert tensor.tolist() == [0, 0, 0]
        tensor.copy_(torch.arange(3))
        assert tensor.tolist() == [0, 1, 2]
        view.add_(torch.randint(0, 9, (2,), device="vgpu"))  # a view from before
        assert tensor.tolist() == [0, 0, 0]
        assert tensor.fill_(4).tolist() == [4, 4, 4]
        assert tensor.zero_()[1:].tolist() == [0, 0]
        assert card.stand_ins == {"Tensor.tolist": 2}

    def test_truth_that_absorbs_the_unknown(self, card: vgpu.Device) -> None:
        unknown = torch.rand(3, device="vgpu") > 0.5
        yes, no = torch.ones_like(unknown), torch.zeros_like(unknown)
        assert (unknown | yes).tolist() == [True, True, True]
        assert (no & unknown).tolist() == [False, False, False]
        assert torch.logical_or(yes, unknown).all().item() is True
        assert not card.stand_ins
        assert (unknown & yes).tolist() == [False, False, False]
        assert card.stand_ins == {"Tensor.tolist": 1}

    def test_random_numbers_are_not_known(self, card: vgpu.Device) -> None:
        for tensor in (
            torch.randint(0, 9, (3,), device="vgpu"),
            torch.randperm(3, device="vgpu"),
            torch.zeros(3, dtype=torch.long, device="vgpu").random_(9),
            torch.zeros(1, device="vgpu").normal_(),
        ):
            before = card.stand_ins.total()
            tensor.tolist()
            assert card.stand_ins.total() == before + 1

    def test_what_the_host_cannot_compute_is_not_known(self, card: vgpu.Device) -> None:
        quotient = torch.tensor([4], device="vgpu") // torch.tensor([0], device="vgpu")
        quotient.tolist()
        assert card.stand_ins == {"Tensor.tolist": 1}

    def test_goes_with_data(self, card: vgpu.Device) -> None:
        tensor = torch.zeros(3, dtype=torch.long, device="vgpu")
        tensor.data = torch.ones(3, dtype=torch.long, device="vgpu")
        assert tensor.tolist() == [1, 1, 1]
        tensor.data = torch.randint(0, 9, (3,), device="vgpu")
        tensor.tolist()
        assert card.stand_ins == {"Tensor.tolist": 1}

    def test_does_not_cost_memory(self, card: vgpu.Device) -> None:
        tensor = torch.arange(3, device="vgpu")
        assert torch.vgpu.memory_allocated() == 512
        tensor.tolist()
        assert torch.vgpu.memory_allocated() == 512


class TestStandIns:
    """Zero, false, and a count of how often."""

    def test_numbers(self, card: vgpu.Device) -> None:
        tensor = torch.rand(3, device="vgpu")
        assert tensor.sum().item() == 0.0
        assert int(torch.randint(0, 9, (1,), device="vgpu")) == 0
        assert card.stand_ins == {ITEM: 2}

    def test_truth(self, card: vgpu.Device) -> None:
        tensor = torch.rand(3, device="vgpu")
        assert not tensor.sum() > 0.5
        assert not torch.isnan(tensor).any()
        assert card.stand_ins == {ITEM: 2}

    def test_lists_and_arrays(self, card: vgpu.Device) -> None:
        tensor = torch.rand(2, 2, device="vgpu")
        assert tensor.tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert (tensor > 0).tolist() == [[False, False], [False, False]]
        assert tensor.cpu().numpy().tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert card.stand_ins == {"Tensor.tolist": 2, "Tensor.numpy": 1}

    def test_equality(self, card: vgpu.Device) -> None:
        tensor = torch.rand(3, device="vgpu")
        assert torch.equal(tensor, tensor + 1)
        assert torch.allclose(tensor, tensor + 1)
        assert not torch.equal(tensor, tensor[:2])
        assert card.stand_ins == {"aten.equal.default": 1, "aten.allclose.default": 1}
        assert not torch.equal(torch.arange(3, device="vgpu"), torch.ones(3, dtype=torch.long, device="vgpu"))

    def test_data_copied_into_a_real_tensor(self, card: vgpu.Device) -> None:
        target = torch.ones(3)
        target.copy_(torch.rand(3, device="vgpu"))
        assert target.tolist() == [0.0, 0.0, 0.0]
        assert card.stand_ins == {"aten.copy_.default": 1}
        target.to("vgpu", torch.long).tolist()  # which is not known for that
        assert card.stand_ins["Tensor.tolist"] == 1

    def test_known_values_copied_into_a_real_tensor(self, card: vgpu.Device) -> None:
        target = torch.zeros(3, dtype=torch.long)
        target.copy_(torch.arange(3, device="vgpu"))
        assert target.tolist() == [0, 1, 2]
        assert not card.stand_ins

    def test_asking_waits_for_the_card(self, card: vgpu.Device) -> None:
        for ask in (lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: bool((x > 0).any())):
            tensor = torch.rand(2**20, device="vgpu")
            torch.vgpu.synchronize()
            for _ in range(50):
                tensor = tensor * 2
            assert not torch.vgpu.current_stream().query()
            ask(tensor)
            assert torch.vgpu.current_stream().query()

    def test_distributions_find_their_arguments_valid(self, card: vgpu.Device) -> None:
        logits = torch.rand(4, 8, device="vgpu", requires_grad=True)
        choice = torch.distributions.Categorical(logits=logits)
        choice.log_prob(choice.sample()).sum().backward()
        normal = torch.distributions.Normal(logits, logits.exp())
        normal.rsample().sum().backward()
        normal.log_prob(normal.sample())
        torch.distributions.Bernoulli(logits=logits).sample()
        torch.distributions.Beta(logits.exp(), logits.exp()).rsample()
        torch.distributions.kl_divergence(choice, torch.distributions.Categorical(logits=logits * 2))

    def test_initialisers_end(self, card: vgpu.Device) -> None:
        weight = torch.empty(64, 64, device="vgpu")
        for initialise in (
            nn.init.trunc_normal_,
            nn.init.orthogonal_,
            nn.init.kaiming_normal_,
            nn.init.xavier_uniform_,
            nn.init.ones_,
        ):
            initialise(weight)
        nn.init.sparse_(weight, 0.1)


class TestLoops:
    """Loops that end on data end, whichever answer they wait for."""

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(stand_ins, "PATIENCE", 20)

    def test_until_true(self, card: vgpu.Device) -> None:
        x, rounds = torch.rand(3, device="vgpu"), 0
        while not x.sum() > 0.5:
            rounds += 1
        assert rounds == 19

    def test_while_true(self, card: vgpu.Device) -> None:
        x, rounds = torch.rand(3, device="vgpu"), 0
        while torch.equal(x, x):
            rounds += 1
        assert rounds == 19

    def test_until_a_number_is_large(self, card: vgpu.Device) -> None:
        x, rounds = torch.rand(3, device="vgpu"), 0
        while x.max().item() < 0.5:
            x, rounds = x + 1, rounds + 1
        assert rounds == 19

    def test_until_a_number_is_zero(self, card: vgpu.Device) -> None:
        x, rounds = torch.rand(3, device="vgpu"), 0
        while x.max().item() != 0:
            rounds += 1
        assert rounds == 0

    def test_in_a_function(self, card: vgpu.Device) -> None:
        x, rounds = torch.rand(3, device="vgpu"), 0

        def done() -> bool:
            return bool((x > 0.5).all())

        while not done():
            rounds += 1
        assert rounds == 19

    def test_with_two_questions_a_round(self, card: vgpu.Device) -> None:
        x, rounds = torch.rand(3, device="vgpu"), 0
        while not (x.sum() > 1):
            assert x.sum().item() == 0.0 or rounds >= 19
            rounds += 1
        assert rounds == 19

    def test_twice(self, card: vgpu.Device) -> None:
        x = torch.rand(3, device="vgpu")
        for _ in range(3):
            while not x.sum() > 0.5:
                pass
            while x.sum() > 0.5:
                pass

    def test_that_ends_by_itself_is_told_one_thing(self, card: vgpu.Device, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        x = torch.rand(3, device="vgpu")
        assert not any(torch.isnan(x).any() for _ in range(400))  # one for each parameter of a large model

    def test_generation_ends_at_its_length(self, card: vgpu.Device) -> None:
        tokens = torch.zeros(2, 1, dtype=torch.long, device="vgpu")
        while True:
            tokens = torch.cat([tokens, torch.randint(0, 9, (2, 1), device="vgpu")], dim=1)
            ended = tokens[:, -1] == 3
            full = torch.full((2,), tokens.size(1) >= 6, device="vgpu")
            if (ended | full).all():
                break
        assert tokens.size(1) == 6


class TestLengths:
    """Outputs as long as the data say."""

    def test_known(self, card: vgpu.Device) -> None:
        mask = torch.tensor([True, False, True, False], device="vgpu")
        x = torch.rand(4, device="vgpu")
        assert mask.nonzero().tolist() == [[0], [2]]
        assert torch.masked_select(x, mask).shape == x[mask].shape == (2,)
        assert [each.tolist() for each in torch.where(mask)] == [[0, 2]]
        assert torch.rand(4, 3, device="vgpu")[mask].shape == (2, 3)
        assert torch.rand(3, 4, device="vgpu")[:, mask].shape == (3, 2)
        assert torch.unique(torch.tensor([3, 1, 3], device="vgpu")).tolist() == [1, 3]
        assert torch.bincount(torch.tensor([0, 2, 2], device="vgpu")).tolist() == [1, 0, 2]
        counts = torch.tensor([2, 0, 1], device="vgpu")
        assert torch.repeat_interleave(torch.rand(3, device="vgpu"), counts).shape == (3,)
        assert F.one_hot(torch.tensor([0, 2], device="vgpu")).shape == (2, 3)
        assert not card.stand_ins

    def test_unknown_is_the_longest(self, card: vgpu.Device) -> None:
        x = torch.rand(2, 3, device="vgpu")
        mask = x > 0.5
        assert mask.nonzero().shape == (6, 2)
        assert [each.shape for each in torch.where(mask)] == [(6,), (6,)]
        assert torch.masked_select(x, mask).shape == x[mask].shape == (6,)
        assert torch.unique(x).shape == (6,)
        assert torch.unique_consecutive(x, dim=0).shape == (2, 3)
        assert torch.argwhere(x).shape == (6, 2)
        assert torch.bincount(torch.randint(0, 9, (5,), device="vgpu"), minlength=9).shape == (9,)
        assert len(card.stand_ins) > 3

    def test_masks_write(self, card: vgpu.Device) -> None:
        x = torch.rand(2, 3, device="vgpu")
        mask = x > 0.5
        x[mask] = 0
        x[torch.tensor([True, False], device="vgpu")] = torch.rand(1, 3, device="vgpu")
        x.masked_fill_(mask, 1.0)
        x.index_put_((mask,), torch.tensor(1.0, device="vgpu"))
        assert card.stand_ins == {"mask as an index": 2}

    def test_masks_keep_memory_and_gradient(self, card: vgpu.Device) -> None:
        x = torch.rand(4, 1000, device="vgpu", requires_grad=True)
        picked = x[torch.tensor([True, False, True, True], device="vgpu")]
        assert torch.vgpu.memory_stats()["requested_bytes.all.current"] >= (4 + 3) * 4000
        picked.sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (4, 1000)

    def test_packed_sequences(self, card: vgpu.Device) -> None:
        x = torch.rand(3, 5, 8, device="vgpu", requires_grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        assert packed.data.shape == (10, 8)
        assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
        padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        assert padded.shape == (3, 5, 8)
        assert lengths.tolist() == [5, 3, 2]
        padded.sum().backward()
        assert x.grad is not None


class TestReal:
    """Small tensors that never touched the card keep their data."""

    @pytest.mark.parametrize(
        "make",
        [
            lambda: torch.arange(4).sum(),
            lambda: torch.tensor([1, 2, 3]),
            lambda: torch.rand(3) > 2,
            lambda: torch.ones(3, dtype=torch.float64).cumsum(0),
            lambda: torch.arange(3).data,
            lambda: nn.Parameter(torch.ones(2)).detach(),
        ],
    )
    def test_real(self, card: vgpu.Device, make: Callable[[], Tensor]) -> None:
        tensor: Any = make()
        assert type(tensor) is Tensor
        tensor.tolist()
        assert not card.stand_ins

    def test_learns(self, card: vgpu.Device) -> None:
        torch.manual_seed(0)
        layer = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
        losses = []
        for _ in range(20):
            loss = (layer(torch.ones(4, 2)) - 3).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
