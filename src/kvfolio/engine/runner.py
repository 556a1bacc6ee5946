"""Carries out a step: its chunks become one row of tokens, one forward pass, and logits for those that sample.

Knows nothing of text, sampling or why the scheduler chose these chunks.
"""

import torch
from torch import Tensor

from kvfolio.models.build import LanguageModel
from kvfolio.models.parts import Ops
from kvfolio.sched.request import Step
from kvfolio.store.view import ChunkRows, StoreViews


class Runner:
    """One model on one store."""

    def __init__(
        self, model: LanguageModel, ops: Ops, views: StoreViews, device: torch.device, expands_prompts: bool = False
    ) -> None:
        """``expands_prompts``: latent layers compute tokens of prompts in the expanded form."""
        self._model = model
        self._ops = ops
        self._views = views
        self._device = device
        self._expands_prompts = expands_prompts

    def run(self, step: Step) -> Tensor:
        """Compute ``step``; returns logits [num_rows, vocab] in the order of its chunks.

        A chunk that scores has a row for each of its tokens, one that only samples a row for its last.

        Side effect: the store holds keys and values of all its tokens.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        for chunk in step.chunks:
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.start + len(chunk.token_ids)))
            if chunk.scores:
                rows.extend(range(len(token_ids) - len(chunk.token_ids), len(token_ids)))
            elif chunk.samples:
                rows.append(len(token_ids) - 1)
        view = self._views.view(
            [
                ChunkRows(
                    chunk.start,
                    len(chunk.token_ids),
                    chunk.tables,
                    chunk.num_prompt_tokens if self._expands_prompts else 0,
                )
                for chunk in step.chunks
            ]
        )
        with torch.inference_mode():
            return self._model.forward(
                self._tensor(token_ids), self._tensor(positions), view, self._ops, self._tensor(rows)
            )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
