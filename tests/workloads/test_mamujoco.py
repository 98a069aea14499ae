"""The environment and the replay buffer."""

import numpy as np
import pytest

from workloads.mamujoco import ACTION, AGENTS, OBSERVATION, STATE, Hopper, Transition
from workloads.replay import ReplayBuffer

# Where in the state each agent's observation lies: position and velocity of its joint, positions of the joints beside
# it, then the torso (gymnasium-robotics 1.4.2, agent_obsk 1).
SEEN = ([2, 8, 3, 0, 1, 5, 6, 7], [3, 9, 4, 2, 0, 1, 5, 6, 7], [4, 10, 3, 0, 1, 5, 6, 7])


def random_steps(hopper: Hopper, count: int, seed: int = 0) -> list[Transition]:
    rng = np.random.default_rng(seed)
    return [hopper.step(rng.uniform(-1, 1, (AGENTS, ACTION)).astype(np.float32)) for _ in range(count)]


def test_agents_see_8_9_and_8_numbers_of_the_state_of_11_and_act_with_1() -> None:
    assert (AGENTS, OBSERVATION, ACTION, STATE) == (3, 9, 1, 11)
    for transition in random_steps(Hopper(0), 50):
        assert [field.shape for field in transition] == [(3, 9), (11,), (3, 1), (1,), (1,), (1,)]
        assert all(field.dtype == np.float32 for field in transition)
        for agent, index in enumerate(SEEN):
            padded = np.zeros(9, np.float32)
            padded[: len(index)] = transition.state[index]
            np.testing.assert_array_equal(transition.observations[agent], padded)


def test_the_seed_fixes_the_data() -> None:
    once, again, other = (random_steps(Hopper(seed), 100) for seed in (1, 1, 2))
    for first, second in zip(once, again, strict=True):
        for field, same in zip(first, second, strict=True):
            np.testing.assert_array_equal(field, same)
    assert not np.array_equal(once[0].state, other[0].state)


def test_an_episode_starts_after_a_fall_and_nowhere_else() -> None:
    transitions = random_steps(Hopper(0), 300)
    ends = [transition.terminal.item() for transition in transitions]
    starts = [transition.start.item() for transition in transitions]
    assert starts == [1.0, *ends[:-1]]
    assert sum(ends) > 3


def test_an_episode_is_cut_at_1000_steps_without_a_terminal() -> None:
    # No policy here stands that long, so the limit is brought nearer.
    hopper = Hopper(0)
    hopper._environment.single_agent_env._max_episode_steps = 3
    transitions = random_steps(hopper, 6)
    assert [transition.start.item() for transition in transitions] == [1, 0, 0, 1, 0, 0]
    assert not any(transition.terminal.item() for transition in transitions)


def test_the_limit_is_1000_steps() -> None:
    assert Hopper(0)._environment.single_agent_env.spec.max_episode_steps == 1000


def numbered(number: int) -> Transition:
    """A transition in which every number is `number`."""
    shapes = ((AGENTS, OBSERVATION), (STATE,), (AGENTS, ACTION), (1,), (1,), (1,))
    return Transition(*(np.full(shape, number, np.float32) for shape in shapes))


@pytest.mark.parametrize("added", [3, 6, 7, 8, 13, 14, 20])
def test_sequences_are_consecutive_and_cover_the_latest_transitions(added: int) -> None:
    replay = ReplayBuffer(capacity=7)
    for number in range(added):
        replay.add(numbered(number))
    assert replay.size == min(added, 7)
    begins = replay.draw(np.random.default_rng(0), count=200, length=3)
    sequences = replay.sequences(begins, length=3)
    assert [field.shape[:2] for field in sequences] == [(3, 200)] * 6
    rewards = sequences.reward[..., 0]
    np.testing.assert_array_equal(np.diff(rewards, axis=0), 1)
    assert set(rewards.ravel()) == set(range(max(0, added - 7), added))
    for field in sequences:
        np.testing.assert_array_equal(field.reshape(3, 200, -1)[..., 0], rewards)


def test_a_sequence_longer_than_the_data_is_refused() -> None:
    replay = ReplayBuffer(capacity=7)
    replay.add(numbered(0))
    with pytest.raises(ValueError, match="a sequence of 2 does not fit a buffer that holds 1 transitions"):
        replay.draw(np.random.default_rng(0), count=1, length=2)


def test_the_published_buffer_takes_1_76_mb() -> None:
    fields = ReplayBuffer(capacity=10_000)._fields
    assert sum(field.nbytes for field in fields) == 1_760_000
