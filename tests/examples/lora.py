"""Llama with LoRA by peft: a frozen base, of which no checkpoint holds a copy, and adapters that train."""

from typing import Any

import tests.examples.operators  # noqa: F401 - transformers imports torchvision where it is installed


def model(pretrained: str | None = None, rank: int = 8) -> Any:
    """Adapters of `rank` on the base, and a head of their own, since that of a random base knows nothing."""
    from peft import LoraConfig, get_peft_model

    where = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    return get_peft_model(base(pretrained), LoraConfig(r=rank, lora_alpha=2 * rank, task_type="CAUSAL_LM", **where))


def base(pretrained: str | None = None) -> Any:
    """The model in a folder of `save_pretrained`, or one of a hub; without a name a small random one, for bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if pretrained is not None:
        return LlamaForCausalLM.from_pretrained(pretrained)
    size = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
    return LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, max_position_embeddings=64))
