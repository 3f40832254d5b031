"""Nets of Hugging Face's transformers with random weights, for `suite.py` and `training_nets.py`, where installed.

Sizes are those of the base models. Dropout is off where results are compared (``dropout=0.0``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLASSES = 10


class Logits(nn.Module):
    """A model's logits; of a language model those of the last position."""

    def __init__(self, model: nn.Module, *, last: bool = False) -> None:
        super().__init__()
        self.model, self._last = model, last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._last:
            return self.model(x, use_cache=False).logits[:, -1]
        return self.model(x).logits


def installed() -> bool:
    return importlib.util.find_spec("transformers") is not None


def nets(tiny: bool, words: int, image_size: int, dropout: float = 0.1) -> dict[str, Callable[[], nn.Module]]:
    """Language models take tokens below ``words``; `hf-vit` and `hf-convnext` take images."""
    import transformers as hf

    layers, width, heads = (2, 64, 4) if tiny else (12, 768, 12)
    hidden: dict[str, Any] = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }
    dropouts = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    bert = {"vocab_size": words, "num_labels": CLASSES, **hidden, **dropouts}
    gpt2 = {"vocab_size": words, "n_embd": width, "n_layer": layers, "n_head": heads}
    gpt2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    llama = {"vocab_size": words, "num_key_value_heads": heads // 2, **hidden}
    vit = {"image_size": image_size, "num_labels": CLASSES, **hidden, **dropouts}
    convnext: dict[str, Any] = {"num_labels": CLASSES}
    if tiny:
        convnext |= {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 1, 1]}
    return {
        "hf-bert": lambda: Logits(hf.BertForSequenceClassification(hf.BertConfig(**bert))),
        "hf-gpt2": lambda: Logits(hf.GPT2LMHeadModel(hf.GPT2Config(**gpt2)), last=True),
        "hf-llama": lambda: Logits(hf.LlamaForCausalLM(hf.LlamaConfig(**llama)), last=True),
        "hf-vit": lambda: Logits(hf.ViTForImageClassification(hf.ViTConfig(**vit))),
        "hf-convnext": lambda: Logits(hf.ConvNextV2ForImageClassification(hf.ConvNextV2Config(**convnext))),
    }
