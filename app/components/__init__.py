"""Parts of a training loop besides the model: optimizer, schedule, triggers, validation."""
