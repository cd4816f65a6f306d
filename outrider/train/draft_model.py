"""Kind `draft-model`: a small causal language model that learns the target's full distribution at
every position of the response.

Where it starts: `--init FOLDER` (an existing model with the target's tokenizer), some of the
target's own layers (`init_layers`, as DistilBERT did), or random weights of given sizes. Saved as a
plain transformers folder, with the target's tokenizer and chat template: `--draft`, and
transformers' assisted generation, load it. Source: DistillSpec (2310.08461).

With `parallel` it also learns to guess tokens further on from mask tokens after the text
(`masked.py`), so that it drafts them all in one pass; its config names the mask token.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from outrider.errors import ConfigError
from outrider.models.loading.load import load_config, load_module, load_tokenizer
from outrider.models.source import resolve
from outrider.models.tokens.vocabulary import check_same_vocabulary, fit_width, mask_token_in
from outrider.settings import checked, setting
from outrider.train.expected import chain_means, chain_windows
from outrider.train.losses import acceptance, parse_loss, softmax_fp32, weighted_mean
from outrider.train.masked import check_masks, free_token, masked_text
from outrider.train.new_model import scratch_model, thinned_model
from outrider.train.recipe import FeatureBatch, LossReport, RecipeSetup

OWNER = "kind 'draft-model'"


@checked()
@dataclass(frozen=True)
class DraftModelTraining:
    """The model to train, its origin and its data."""

    loss: str = setting(
        "kl", "losses.py: kl, reverse_kl, jsd, tv, ce, nla, lk_hybrid, or a sum like 0.1*ce+0.9*tv"
    )
    depth: int = setting(
        5, "draft tokens per step that the expected tau is computed for", at_least=1
    )
    parallel: int = setting(
        0,
        "draft tokens that it learns to guess in one pass, by mask tokens after the text (PARD); "
        "0: token by token",
        at_least=0,
    )
    init_layers: str = setting(
        "", "start from the target's layers: how many (spread evenly), or a list like 0,2,7"
    )
    hidden_size: int = setting(0, "from scratch: width. 0: the target's halved", at_least=0)
    num_layers: int = setting(
        0, "from scratch: layers. 0: a quarter of the target's, at least 1", at_least=0
    )
    num_heads: int = setting(0, "from scratch: attention heads. 0: the target's halved", at_least=0)
    intermediate_size: int = setting(
        0, "from scratch: width of the MLP. 0: the target's halved", at_least=0
    )

    def __post_init__(self) -> None:
        if self.init_layers and self.sizes:
            raise ConfigError(
                f"{OWNER}: give init_layers, or sizes of a model from scratch "
                f"({', '.join(self.sizes)}), not both"
            )
        parse_loss(self.loss)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes that were given."""
        names = ("hidden_size", "num_layers", "num_heads", "intermediate_size")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


class DraftModelRecipe:
    """Trains a draft model; satisfies `recipe.Recipe`."""

    Settings: ClassVar[type] = DraftModelTraining
    drafter: ClassVar[str] = "draft-model"
    uses_draft: ClassVar[bool] = True
    default_lr: ClassVar[float | None] = None
    signals: tuple[int, ...] = ()

    def __init__(
        self,
        module: Any,
        settings: DraftModelTraining,
        tokenizer: Any,
        dtype: torch.dtype,
        generation: Any,
        mask_token: int | None = None,
    ) -> None:
        """`dtype`: of the saved weights; training is in fp32. `generation`: the target's generation
        config. `mask_token`: with `parallel`."""
        self._mask_token = mask_token
        self.module = module.float().requires_grad_(True)
        self._settings = settings
        self._tokenizer = tokenizer
        self._dtype = dtype
        self._generation = generation
        self._loss = parse_loss(settings.loss)

    @classmethod
    def build(cls, setup: RecipeSetup) -> DraftModelRecipe:
        settings: DraftModelTraining = setup.settings
        if setup.init is not None and (settings.init_layers or settings.sizes):
            given = "init_layers" if settings.init_layers else ", ".join(settings.sizes)
            raise ConfigError(f"{OWNER}: --init {setup.init} is a whole model; leave {given} out")
        if setup.init is not None:
            module = _existing(setup, setup.init)
        elif settings.init_layers:
            module = thinned_model(setup.target, settings.init_layers, OWNER)
        else:
            module = scratch_model(setup.target, settings.sizes, OWNER)
        return cls(
            module,
            settings,
            setup.tokenizer,
            setup.saved_dtype,
            getattr(setup.target, "generation_config", None),
            _mask_token(module, setup) if settings.parallel else None,
        )

    def loss(self, batch: FeatureBatch) -> LossReport:
        if self._mask_token is not None:
            return self._masked_loss(batch, self._mask_token)
        logits = self.module(
            input_ids=batch.tokens, attention_mask=batch.valid.long(), use_cache=False
        ).logits
        # (positions, V): only what counts is turned into distributions
        wanted = softmax_fp32(batch.logits[batch.mask])
        guessed = fit_width(logits[batch.mask].float(), wanted.shape[-1])
        values = self._loss(wanted, guessed)
        loss = weighted_mean(values, torch.ones_like(values))
        accept = torch.zeros(batch.mask.shape, device=loss.device)
        accept[batch.mask] = acceptance(wanted, guessed).detach()
        per_position, survival, count = chain_windows(accept, batch.mask, self._settings.depth)
        return LossReport(
            loss,
            per_position,
            {"acceptance": float(accept.sum() / batch.mask.sum())},
            survival,
            max(count, 1),
        )

    def _masked_loss(self, batch: FeatureBatch, mask_token: int) -> LossReport:
        """The loss at the text's own positions and at the masks of some anchors."""
        length = batch.tokens.shape[1]
        masked = masked_text(batch, self._settings.parallel - 1, mask_token)
        (num_rows, num_anchors, num_guesses) = masked.counts.shape
        logits = masked.logits(self.module)
        # of which the masks' learn: their place, or the text's end where that is beyond
        places = (masked.starts[..., None] + torch.arange(num_guesses, device=logits.device)).clamp(
            max=length - 1
        )
        learnt = torch.cat([batch.mask, masked.counts[..., 1:].flatten(1)], dim=1)
        rows = torch.arange(num_rows, device=logits.device)[:, None]
        index = torch.cat(
            [rows.new_tensor(range(length)).expand(num_rows, -1), places[..., 1:].flatten(1)], dim=1
        )
        wanted = softmax_fp32(batch.logits[rows.expand_as(index)[learnt], index[learnt]])
        guessed = fit_width(logits[learnt].float(), wanted.shape[-1])
        values = self._loss(wanted, guessed)
        accept = torch.zeros(learnt.shape, device=logits.device)
        accept[learnt] = acceptance(wanted, guessed).detach()
        first = accept[:, :length].gather(1, masked.starts)[..., None]
        chains = torch.cat([first, accept[:, length:].view(num_rows, num_anchors, -1)], dim=2)
        per_position, survival, count = chain_means(chains.unbind(2), masked.counts.unbind(2))
        return LossReport(
            values.mean(),
            per_position,
            {"acceptance": float(accept[:, :length].sum() / batch.mask.sum())},
            survival,
            max(count, 1),
        )

    def save(self, folder: Path) -> None:
        # a copy: rounding must not reach the training
        copy.deepcopy(self.module).to(self._dtype).save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
        if self._generation is not None:
            self._generation.save_pretrained(folder)


def _mask_token(module: Any, setup: RecipeSetup) -> int:
    """The mask token of a model that has one, else a free one, which its config then names.

    Raises CapabilityError for a model that cannot be trained with masks.
    """
    config = module.config
    size = config.get_text_config().vocab_size
    token = mask_token_in(config.to_dict(), size, str(setup.init))
    if token is None:
        token = free_token(setup.tokenizer, setup.token_counts, size)
        config.pard_token = token
        config.spd_type = "pard"
    check_masks(module, token, OWNER)
    return token


def _existing(setup: RecipeSetup, folder: Path) -> Any:
    """An existing model. Raises CapabilityError when its tokenizer is not the target's."""
    name = str(folder)
    source = resolve(name)
    config = load_config(source)
    check_same_vocabulary(setup.tokenizer, load_tokenizer(source), setup.name, name)
    return load_module(source, config, torch.float32, torch.device("cpu"))
