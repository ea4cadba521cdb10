"""The parts of a training loop that are not the model: process state, optimizer, schedule, triggers, validation."""
