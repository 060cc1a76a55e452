"""Adapters of peft, for models of the tests."""

from pathlib import Path
from typing import Any

import peft
import torch


def save_adapter(model: Any, folder: Path, seed: int = 0, **settings: Any) -> Any:
    """Saves a LoRA adapter with weights of a seed for the model. Returns the model with the adapter."""
    torch.manual_seed(20261129 + seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad and "lora" not in name:  # the head, far from the base's
                parameter.normal_()
    adapted.save_pretrained(folder)
    return adapted.eval()
