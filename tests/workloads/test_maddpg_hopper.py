"""MADDPG: sizes as published, gradients where they belong, and learning on the real environment."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from bench.workload import load_workload
from workloads.maddpg_hopper import Batch, MaddpgHopper, MaddpgSettings
from workloads.maddpg_networks import Policy, joint_actions

TINY = MaddpgHopper.presets["tiny"]


@pytest.fixture
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(settings: MaddpgSettings = TINY) -> MaddpgHopper:
    torch.manual_seed(0)
    workload = MaddpgHopper(settings)
    workload.place(torch.device("cpu"))
    return workload


def draw(workload: MaddpgHopper) -> Batch:
    return next(workload.micro_batches(1))


def gradients(workload: MaddpgHopper, count: int = 1) -> dict[str, Tensor]:
    for micro_batch in workload.micro_batches(count):
        for loss in workload.losses(micro_batch):
            (loss / count).backward()
    return {
        f"{name}.{key}": parameter.grad
        for name, network in workload.networks.items()
        for key, parameter in network.named_parameters()
    }


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def randomize_targets(workload: MaddpgHopper) -> None:
    for target in workload.targets.values():
        for parameter in target.parameters():
            parameter.normal_()


def test_it_is_a_workload() -> None:
    assert load_workload("workloads.maddpg_hopper:MaddpgHopper") is MaddpgHopper
    assert list(MaddpgHopper.presets) == ["scaled", "stock", "tiny"]


def test_the_stock_preset_has_the_published_sizes() -> None:
    workload = build(MaddpgHopper.presets["stock"])
    assert size(workload.policy) == 25_665
    assert size(workload.critic.first) == size(workload.critic.second) == 18_561
    assert sum(size(network) for network in workload.networks.values()) == 62_787
    assert {name: size(target) for name, target in workload.targets.items()} == {"critic": 37_122, "policy": 25_665}
    assert workload.items_per_step == 32 * 10


def test_separate_networks_have_three_times_the_parameters() -> None:
    workload = build(dataclasses.replace(MaddpgHopper.presets["stock"], sharing="separate"))
    assert size(workload.policy) == 3 * 25_665
    assert size(workload.critic) == 3 * 2 * 18_561


@pytest.mark.parametrize("sharing", ["shared", "separate"])
def test_every_parameter_learns_and_blocks_hold_them_all(sharing: str) -> None:
    workload = build(dataclasses.replace(TINY, sharing=sharing))
    assert all(gradient.abs().sum() > 0 for gradient in gradients(workload).values())
    networks = sum(size(network) for network in workload.networks.values())
    assert sum(size(block) for block in workload.blocks()) == networks
    assert sum(size(module) for module in workload.phases().values()) == 2 * networks


def test_separate_policies_act_on_their_own_agent_only() -> None:
    policy = build(dataclasses.replace(TINY, sharing="separate")).policy
    observations, start = torch.randn(4, 2, 3, 9), torch.zeros(4, 2, 1)
    before, _ = policy(observations, start)
    with torch.no_grad():
        policy.steps[1].action.bias += 1
    after, _ = policy(observations, start)
    changed = (after != before).flatten(0, 1).all(dim=0).squeeze(-1)
    assert changed.tolist() == [False, True, False]


@pytest.mark.parametrize(("sharing", "wrong"), [("shared", False), ("separate", False), ("none", True)])
def test_sharing_is_one_of_two_words(sharing: str, wrong: bool) -> None:
    if wrong:
        with pytest.raises(ValueError, match="choose 'shared' or 'separate'"):
            MaddpgSettings(sharing=sharing)
    else:
        assert MaddpgSettings(sharing=sharing).sharing == sharing


def test_each_agent_sees_its_own_action_among_those_of_the_others() -> None:
    own = torch.tensor([1.0, 2.0, 3.0]).view(1, 1, 3, 1)
    joint = joint_actions(own, -own)
    assert joint[0, 0].tolist() == [[1, -2, -3], [-1, 2, -3], [-1, -2, 3]]


def test_gradients_reach_an_agent_through_its_own_action_only() -> None:
    actions = torch.randn(1, 1, 3, 1, requires_grad=True)
    weights = torch.arange(1.0, 10.0).view(3, 3)
    (joint_actions(actions, actions)[0, 0] * weights).sum().backward()
    assert actions.grad is not None
    assert actions.grad.flatten().tolist() == weights.diagonal().tolist()


def test_the_policy_unrolls_as_it_acts_step_by_step_and_forgets_at_a_start() -> None:
    policy = build().policy
    observations, start = torch.randn(6, 2, 3, 9), torch.zeros(6, 2, 1)
    start[4, 1] = 1
    actions, _ = policy(observations, start)
    memories = None
    for time in range(6):
        action, memories = policy(observations[time : time + 1], start[time : time + 1], memories)
        torch.testing.assert_close(action[0], actions[time])
    fresh, _ = policy(observations[4:], torch.zeros(2, 2, 1))
    torch.testing.assert_close(actions[4:, 1], fresh[:, 1])
    assert not torch.allclose(actions[4:, 0], fresh[:, 0])


def test_agents_differ_by_their_number_alone() -> None:
    policy = build().policy
    assert isinstance(policy, Policy)
    actions, _ = policy(torch.ones(1, 1, 3, 9), torch.zeros(1, 1, 1))
    assert len(set(actions.flatten().tolist())) == 3


def test_each_loss_trains_its_own_network() -> None:
    workload = build()
    losses = workload.losses(draw(workload))
    next(losses).backward()
    critic = [parameter.grad.clone() for parameter in workload.critic.parameters()]
    assert all(parameter.grad is None for parameter in workload.policy.parameters())
    next(losses).backward()
    for parameter, gradient in zip(workload.critic.parameters(), critic, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)
    assert all(parameter.grad is not None for parameter in workload.policy.parameters())
    assert next(losses, None) is None
    assert all(parameter.requires_grad for parameter in workload.critic.parameters())
    assert all(parameter.grad is None for target in workload.targets.values() for parameter in target.parameters())


def test_the_critics_are_thawed_when_a_step_is_given_up() -> None:
    workload = build()
    losses = workload.losses(draw(workload))
    next(losses)
    next(losses)
    losses.close()
    assert all(parameter.requires_grad for parameter in workload.critic.parameters())


@torch.no_grad()
def test_the_critic_loss_is_the_twins_half_squared_td_error() -> None:
    workload = build()
    randomize_targets(workload)
    batch = draw(workload)
    next_actions, _ = workload.target_policy(batch.observations, batch.start)
    # Where all actions come from one source, every agent sees the same joint action: one agent's value is the mean's.
    seen, following = (torch.cat([batch.state, acts.flatten(2)], -1) for acts in (batch.actions, next_actions))
    first, second = (critic.values[0](following) for critic in workload.target_critic.children())
    target = batch.reward[:-1] + 0.99 * (1 - batch.terminal[:-1]) * torch.minimum(first, second)[1:]
    errors = [0.5 * (target - critic.values[0](seen)[:-1]) ** 2 for critic in workload.critic.children()]
    torch.testing.assert_close(workload._critic_loss(batch), torch.stack(errors).mean())
    assert batch.terminal.sum() > 0


@torch.no_grad()
def test_the_policy_loss_is_the_smaller_value_and_the_penalty_on_actions() -> None:
    workload = build()
    batch = draw(workload)
    actions, _ = workload.policy(batch.observations, batch.start)
    for critic, value in ((workload.critic.first, 5.0), (workload.critic.second, 3.0)):
        critic.values[0][-1].weight.zero_()
        critic.values[0][-1].bias.fill_(value)
    torch.testing.assert_close(workload._policy_loss(batch), 1e-3 * actions.square().mean() - 3)


def test_targets_follow_by_the_published_rate() -> None:
    workload = build()
    randomize_targets(workload)
    before = {name: [p.clone() for p in target.parameters()] for name, target in workload.targets.items()}
    workload.finish_step()
    for name, target in workload.targets.items():
        networks = workload.networks[name].parameters()
        for old, network, new in zip(before[name], networks, target.parameters(), strict=True):
            torch.testing.assert_close(new, 0.99 * old + 0.01 * network)


@pytest.mark.usefixtures("_float64")
@pytest.mark.parametrize("sharing", ["shared", "separate"])
def test_accumulated_gradients_equal_the_full_gradient(sharing: str) -> None:
    settings = dataclasses.replace(TINY, sharing=sharing)
    full, accumulated = gradients(build(settings)), gradients(build(settings), count=4)
    for name, gradient in full.items():
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(accumulated[name], gradient, rtol=1e-10, atol=1e-13)


@pytest.mark.usefixtures("_float64")
def test_recomputing_the_blocks_keeps_the_gradient() -> None:
    plain, workload = gradients(build()), build()
    calls = []
    for block in workload.blocks():
        forward = block.forward

        def recomputed(*inputs: Tensor, forward=forward) -> object:
            calls.append(forward)
            return checkpoint(forward, *inputs, use_reentrant=False)

        block.forward = recomputed  # type: ignore[method-assign]
    for name, gradient in gradients(workload).items():
        torch.testing.assert_close(gradient, plain[name], rtol=0, atol=0)
    assert len(calls) == 10 + 2 + 2  # ten policy steps, and both critics for either loss


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 16 sequences does not divide into 3 equal slices"):
        next(build().micro_batches(3))


def test_slices_make_up_the_batch() -> None:
    whole, slices = draw(build()), list(build().micro_batches(4))
    for name, field in whole._asdict().items():
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in slices], dim=1), field)
    assert whole.observations.shape == (10, 16, 3, 9)


def test_a_train_step_asks_for_no_value() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = MaddpgHopper(TINY)
        optimizers = workload.optimizers()
        gradients(workload)
        for optimizer in optimizers.values():
            optimizer.step()
        workload.finish_step()


def test_the_second_bias_of_the_gru_stays_zero() -> None:
    workload = build()
    train(workload, updates=2)
    memory = workload.policy.steps[0].memory
    assert not memory.bias_hh.any()
    assert memory.bias_ih.shape == memory.bias_hh.shape


def train(workload: MaddpgHopper, updates: int) -> None:
    optimizers = workload.optimizers()
    for _ in range(updates):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        gradients(workload)
        for optimizer in optimizers.values():
            optimizer.step()
        workload.finish_step()
        workload.collect(4)  # og-marl trains once in four environment steps


def test_collected_actions_are_those_of_the_policy() -> None:
    workload = build(dataclasses.replace(TINY, random_steps=0, exploration=0.0))
    workload.collect(60)
    episodes = workload.replay.sequences(np.array([0]), 60)
    observations, _, collected, _, _, start = (torch.from_numpy(field) for field in episodes)
    with torch.no_grad():
        actions, _ = workload.policy(observations, start)
    torch.testing.assert_close(collected, actions)
    assert start.sum() > 1


def test_exploration_spreads_the_actions_within_their_limits() -> None:
    workload = build(dataclasses.replace(TINY, random_steps=0, exploration=2.0))
    workload.collect(60)
    actions = workload.replay.sequences(np.array([0]), 60).actions
    assert actions.min() == -1
    assert actions.max() == 1
    assert len(np.unique(actions)) > 20


@pytest.fixture
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster at this size, and the same sums on every machine
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_one_thread")
def test_it_learns() -> None:
    workload = build()
    untrained = [parameter.detach().clone() for parameter in workload.critic.parameters()]
    untrained_return = workload.evaluate(5)
    train(workload, updates=400)
    trained_return = workload.evaluate(5)
    batch = draw(workload)
    with torch.no_grad():
        loss = workload._critic_loss(batch)
        for parameter, value in zip(workload.critic.parameters(), untrained, strict=True):
            parameter.copy_(value)
        untrained_loss = workload._critic_loss(batch)
    fields = workload.replay._fields
    random_return = fields.reward[: TINY.random_steps].sum() / fields.start[: TINY.random_steps].sum()

    assert workload.replay.size == TINY.random_steps + 4 * 400
    assert loss < 0.1 * untrained_loss  # the same targets, seen by the critics as they are and as they were
    assert trained_return > 1.5 * max(untrained_return, random_return)
