"""A small GPT-2 by Steadfast: python hugging_face_after.py"""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from steadfast import Config, fit

text = "".join(topics.values()).encode()[: 400 * 64]
tokens = torch.tensor(list(text)).view(400, 64)
labels = tokens.clone()
labels[:, 0] = -100  # nothing predicts the first token
samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

torch.manual_seed(0)
size = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=0, eos_token_id=0))
config = Config(
    run={"name": "gpt2", "steps": 20},
    batch={"global_size": 16, "microbatch_size": 8},
    optimizer={"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0, "max_grad_norm": 1.0},
    schedule={"kind": "constant"},
    logging={"every_steps": 1},
)
result = fit(config, model=model, dataset=samples[:320], validation=samples[320:], order="sequential")
print(f"loss {result.summary['metrics']['loss']:.6f}")
result.model.save_pretrained("gpt2/final")
