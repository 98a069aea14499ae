"""Sequence to sequence with REINFORCE on a beam: the training step of the PyTorch forum thread "Seq-to-Seq Encoder
Decoder Models with Reinforcement Learning - CUDA memory consumption debugging".

An LSTM encoder reads the source of a Python function, an LSTM decoder with additive attention writes the first line of
its docstring by beam search, and every hypothesis is rewarded by its sentence chrF against the true line. As in the
thread, the whole search keeps its graph: each decoding step leaves two tensors [rows, source, hidden] behind, the
encoder outputs selected for its hypotheses and tanh(Wx + Uy). At 64 rows that is 118 MiB a step, 1.9 MB per row; the
thread's log grows by 2.0 MB per row and step in its first iteration and by 4.7 in its second. Rows are batch x beam
but in the first step, which has one hypothesis per sample. The thread names Bunel et al. 2018, arXiv:1805.04276, who
search without a graph and score the hypotheses again; it asks why its own way runs out of memory, and so does this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sacrebleu.metrics import CHRF
from torch import Tensor, nn
from torch.nn import functional as F

from workloads.beam import Hypotheses, State, beam_search
from workloads.docstrings import END, Vocabulary, load_pairs


@dataclass(frozen=True)
class Seq2SeqSettings:
    """Sizes and training choices; the defaults are the thread's full run.

    From the thread: batch 16, beam 64, 50 steps, hidden 512. Derived: `source_length`, because the 944.00 MiB that it
    fails on are 1024 rows x 472 x 512 x 4 B; `vocab_size`, because its base memory grows by 156 MB in the first update,
    which is a gradient and Adam's two moments, so 52 MB of weights, 13.6 million. With vocabulary V = 5,120, embedding
    E = 512 and hidden H = 512 the model has 13,645,312 (52.05 MiB in fp32):

    | part | formula | parameters |
    | --- | --- | --- |
    | two embeddings | 2 V E | 5,242,880 |
    | encoder cell | 4 H (E + H + 2) | 2,101,248 |
    | decoder cell | 4 H (E + H + H + 2) | 3,149,824 |
    | attention W, U, v | 2 H H + H | 524,800 |
    | projection | V (H + 1) | 2,626,560 |

    Attributes:
        batch_size: Samples per update.
        beam: Hypotheses per sample.
        max_steps: Decoding steps; always all of them, a finished hypothesis is carried on.
        source_length: Tokens that every source is cut or padded to.
        hidden: Units of both LSTM cells and of the attention.
        embedding: Width of a token's embedding. With `sharing="shared"` it has to equal `hidden`.
        vocab_size: Tokens of the one vocabulary of sources and summaries.
        learning_rate: Adam's. The thread states none; this is PyTorch's default.
        sharing: "shared" ties the encoder's embedding, the decoder's and the output projection.
        seed: Of the weights and of the samples drawn.
    """

    batch_size: int = 16
    beam: int = 64
    max_steps: int = 50
    source_length: int = 472
    hidden: int = 512
    embedding: int = 512
    vocab_size: int = 5120
    learning_rate: float = 1e-3
    sharing: Literal["separate", "shared"] = "separate"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.sharing not in ("separate", "shared"):
            raise ValueError(f'sharing is "separate" or "shared", not {self.sharing!r}')
        if self.sharing == "shared" and self.embedding != self.hidden:
            raise ValueError(f"sharing needs embedding == hidden, not {self.embedding} and {self.hidden}")
        if not 1 <= self.beam <= self.vocab_size:
            raise ValueError(f"{self.vocab_size} first tokens cannot fill a beam of {self.beam}")


class Encoder(nn.Module):
    """Embedding and LSTM cell over the source, the cell called once per token as in the thread."""

    def __init__(self, settings: Seq2SeqSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocab_size, settings.embedding)
        self.cell = nn.LSTMCell(settings.embedding, settings.hidden)

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs [batch, source, hidden], last hidden and cell state [batch, hidden], of tokens [batch, source]."""
        state: tuple[Tensor, Tensor] | None = None
        outputs = []
        for embedded in self.embedding(source).unbind(1):
            state = self.cell(embedded, state)
            outputs.append(state[0])
        assert state is not None
        return torch.stack(outputs, dim=1), *state


class AdditiveAttention(nn.Module):
    """v tanh(W x + U y) between a decoder state x and the encoder outputs y (Bahdanau et al. 2015, arXiv:1409.0473).

    Selecting the encoder outputs of each hypothesis is part of the module, so recomputing its activations in the
    backward keeps no tensor [rows, source, hidden], only the state [rows, hidden].
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w_matrix = nn.Parameter(torch.empty(hidden, hidden))
        self.u_matrix = nn.Parameter(torch.empty(hidden, hidden))
        self.v_vector = nn.Parameter(torch.empty(hidden))

    def forward(self, state: Tensor, memory: Tensor, mask: Tensor, samples: Tensor) -> Tensor:
        """The attended encoder outputs of each row, [rows, hidden].

        Args:
            state: [rows, hidden].
            memory: Encoder outputs, [batch, source, hidden].
            mask: True at source tokens, False at padding, [batch, source].
            samples: The sample that each row belongs to, [rows].
        """
        # Named and freed as the thread's code does it: the three lines hold at most three tensors [rows, source,
        # hidden] at a time, and the sum is the first to ask for the third.
        query = state @ self.w_matrix
        matrix = memory.index_select(0, samples)
        intermediate = matrix @ self.u_matrix
        intermediate = query.unsqueeze(1) + intermediate
        intermediate = torch.tanh(intermediate)
        scores = intermediate @ self.v_vector
        weights = scores.masked_fill(~mask.index_select(0, samples), -torch.inf).softmax(dim=1)
        return (weights.unsqueeze(1) @ matrix).squeeze(1)


class Decoder(nn.Module):
    """One decoding step: attend with the last hidden state, feed [previous token ; attended] to the LSTM cell."""

    def __init__(self, settings: Seq2SeqSettings) -> None:
        super().__init__()
        self.embedding = nn.Embedding(settings.vocab_size, settings.embedding)
        self.attention = AdditiveAttention(settings.hidden)
        self.cell = nn.LSTMCell(settings.embedding + settings.hidden, settings.hidden)
        self.project = nn.Linear(settings.hidden, settings.vocab_size)

    def forward(self, tokens: Tensor, state: State, memory: Tensor, mask: Tensor) -> tuple[Tensor, State]:
        """Log-probabilities of the next token [rows, vocabulary], and the new state.

        Args:
            tokens: The previous tokens, [rows].
            state: Hidden and cell state, [rows, hidden] each, and the sample of each row, [rows].
            memory: Encoder outputs, [batch, source, hidden].
            mask: True at source tokens, [batch, source].
        """
        hidden, cell, samples = state
        attended = self.attention(hidden, memory, mask, samples)
        hidden, cell = self.cell(torch.cat((self.embedding(tokens), attended), dim=1), (hidden, cell))
        return F.log_softmax(self.project(hidden), dim=1), (hidden, cell, samples)


class Seq2Seq(nn.Module):
    """Encoder, and decoder inside a beam search; the search is part of the forward, and keeps its graph."""

    def __init__(self, settings: Seq2SeqSettings) -> None:
        super().__init__()
        self.beam, self.max_steps = settings.beam, settings.max_steps
        self.encoder = Encoder(settings)
        self.decoder = Decoder(settings)
        if settings.sharing == "shared":
            self.decoder.embedding.weight = self.encoder.embedding.weight
            self.decoder.project.weight = self.encoder.embedding.weight
        # Every weight as LSTMCell and Linear draw theirs, but from a generator of its own: the seed alone decides.
        generator = torch.Generator().manual_seed(settings.seed)
        bound = settings.hidden**-0.5
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound, generator=generator)

    def forward(self, source: Tensor) -> Hypotheses:
        """The hypotheses of every source, tokens [batch, source]."""
        memory, hidden, cell = self.encoder(source)
        mask = source != END

        def step(tokens: Tensor, state: State) -> tuple[Tensor, State]:
            log_probs, state = self.decoder(tokens, state, memory, mask)
            return log_probs, state

        samples = torch.arange(source.shape[0], device=source.device)
        start = torch.full_like(samples, END)
        return beam_search(step, (hidden, cell, samples), start, self.beam, self.max_steps, END)


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of a batch: source tokens [samples, source] on the device, and their summaries as text."""

    source: Tensor
    references: tuple[str, ...]


class Seq2SeqBeam:
    """The thread's training step, in the shape of `bench.workload.Workload`.

    The objective is REINFORCE (Williams 1992): minus the mean over samples of the sum over the beam of
    (reward - baseline) x log-probability. Reward is the sentence chrF (Popović 2015; sacrebleu) of the hypothesis's
    words, 0 to 1, baseline the mean reward of the sample's beam. The candidates of a beam are the most probable ones
    and no random draw, as in the thread, so the gradient is not the one of the expected reward.

    Attributes:
        reward: Mean reward of the latest micro-batch's hypotheses, 0 to 1; None before the first.
    """

    presets: ClassVar[Mapping[str, Seq2SeqSettings]] = MappingProxyType(
        {
            "thread": Seq2SeqSettings(),
            # The run that the thread's log shows.
            "logged": Seq2SeqSettings(batch_size=2, beam=32),
            # Not from the thread: trains on a CPU in seconds.
            "tiny": Seq2SeqSettings(
                batch_size=8,
                beam=8,
                max_steps=8,
                source_length=24,
                hidden=32,
                embedding=32,
                vocab_size=128,
                learning_rate=1e-2,
            ),
        }
    )
    # The thread's PyTorch kept zeroed gradients between steps: its base memory grows by them after the first update.
    baseline: ClassVar[Mapping[str, object]] = MappingProxyType({"set_to_none": False})
    unit: ClassVar[str] = "samples"

    def __init__(self, settings: Seq2SeqSettings) -> None:
        self.settings = settings
        self.model = Seq2Seq(settings)
        self.networks: Mapping[str, nn.Module] = {"model": self.model}
        self.reward: float | None = None
        self._pairs = load_pairs()
        self._vocabulary = _vocabulary(settings.vocab_size)
        self._random = np.random.default_rng(settings.seed)
        self._metric = CHRF()
        self._device = torch.device("cpu")

    def place(self, device: torch.device) -> None:
        """Move the model to `device`."""
        self.model.to(device)
        self._device = device

    def optimizers(self) -> Mapping[str, torch.optim.Optimizer]:
        """Adam: the thread's base memory grows by three times the weights in the first update."""
        return {"model": torch.optim.Adam(self.model.parameters(), lr=self.settings.learning_rate)}

    def micro_batches(self, count: int) -> Iterator[MicroBatch]:
        """Draw `batch_size` functions and yield them as `count` slices, each moved to the device when its turn comes.

        Raises:
            ValueError: `count` does not divide the batch size.
        """
        size, rest = divmod(self.settings.batch_size, count)
        if rest:
            raise ValueError(f"a batch of {self.settings.batch_size} has no {count} equal slices")
        drawn = self._random.choice(len(self._pairs), self.settings.batch_size, replace=False)
        for start in range(0, self.settings.batch_size, size):
            yield self._micro_batch(drawn[start : start + size])

    def losses(self, micro_batch: MicroBatch) -> Iterable[Tensor]:
        """The one loss, see the class; a scalar."""
        hypotheses: Hypotheses = self.model(micro_batch.source)
        rewards = self.rewards(hypotheses.tokens.cpu().tolist(), micro_batch.references)
        self.reward = float(rewards.mean())
        advantage = torch.from_numpy(rewards - rewards.mean(axis=1, keepdims=True))
        yield reinforce_loss(hypotheses.log_probability, advantage.to(hypotheses.log_probability))

    def rewards(self, tokens: Sequence[Sequence[Sequence[int]]], references: Sequence[str]) -> NDArray[np.float64]:
        """Sentence chrF, 0 to 1, [samples, beam], of hypotheses [samples, beam, steps] against one text per sample."""
        return np.array(
            [
                [self._reward(self._vocabulary.decode(hypothesis), reference) for hypothesis in beam]
                for beam, reference in zip(tokens, references, strict=True)
            ]
        )

    def finish_step(self) -> None:
        """Nothing follows the optimizer."""

    @property
    def items_per_step(self) -> int:
        """Samples per update."""
        return self.settings.batch_size

    def blocks(self) -> Iterable[nn.Module]:
        """The attention: all that is as long as the source. Recomputed, it keeps [rows, hidden] per step."""
        return (self.model.decoder.attention,)

    def shards(self) -> Iterable[nn.Module]:
        """Encoder, decoder and model; tied weights cannot be split over units, so then the model alone."""
        if self.settings.sharing == "shared":
            return (self.model,)
        return (self.model.encoder, self.model.decoder, self.model)

    def phases(self) -> Mapping[str, nn.Module]:
        """The decoder, called once per decoding step."""
        return {"decoder step": self.model.decoder}

    def _micro_batch(self, drawn: NDArray[np.int64]) -> MicroBatch:
        pairs = [self._pairs[index] for index in drawn]
        tokens = np.stack([self._vocabulary.encode(pair.source, self.settings.source_length) for pair in pairs])
        references = tuple(" ".join(pair.summary) for pair in pairs)
        return MicroBatch(torch.from_numpy(tokens).to(self._device), references)

    def _reward(self, words: Sequence[str], reference: str) -> float:
        if not words:
            return 0.0
        return float(self._metric.sentence_score(" ".join(words), [reference]).score) / 100


def reinforce_loss(log_probability: Tensor, advantage: Tensor) -> Tensor:
    """Minus the mean over samples of sum over hypotheses of advantage x log-probability, both [samples, beam]."""
    return -(advantage * log_probability).sum(dim=1).mean()


@lru_cache(maxsize=4)
def _vocabulary(size: int) -> Vocabulary:
    return Vocabulary(load_pairs(), size)
