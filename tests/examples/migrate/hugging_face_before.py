"""A small GPT-2 by Hugging Face's Trainer: python hugging_face_before.py"""

from pydoc_data.topics import topics

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

text = "".join(topics.values()).encode()[: 400 * 64]
tokens = torch.tensor(list(text)).view(400, 64)
labels = tokens.clone()
labels[:, 0] = -100  # nothing predicts the first token
samples = [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]

torch.manual_seed(0)
size = {"vocab_size": 256, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
model = GPT2LMHeadModel(GPT2Config(**size, **no_dropout, bos_token_id=0, eos_token_id=0))
arguments = TrainingArguments(
    output_dir="gpt2",
    max_steps=20,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    train_sampling_strategy="sequential",
    logging_steps=1,
    save_steps=10,
    report_to="none",
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=samples[:320], eval_dataset=samples[320:])
trainer.train()
print(f"loss {trainer.evaluate()['eval_loss']:.6f}")
trainer.save_model("gpt2/final")
