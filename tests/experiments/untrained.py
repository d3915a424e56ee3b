"""A run that is quick to begin, for tests of the laboratory: a policy that knows nothing, and rewards that differ all the same.

Refuses to be an experiment.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from echo.config import RunConfig
from producers.tiny_policy import build, character_tokenizer
from tests.experiments.loop import make_run


def untrained_run(model: Path, *, steps: int, **sections: Any) -> RunConfig:
    """Two groups a step in two calls, scored by how much of an answer is right. Writes the model folder."""
    torch.manual_seed(0)
    tokenizer = character_tokenizer()
    policy = build(tokenizer)
    policy.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    policy.save_pretrained(model)
    tokenizer.save_pretrained(model)
    return make_run(
        model,
        0,
        task={"params": {"dataset": "spell_backward", "prompt": "{metadata[word]}="}},
        batch={"groups_per_step": 2},
        producer={"groups_per_call": 1},
        # The first step of a warm-up is at 0, and three steps are to move the weights.
        learner={"steps": steps, "warmup_steps": 0},
        **sections,
    )
