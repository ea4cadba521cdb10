"""Parts of the training loop: state of a worker, validation, periodic actions, and checks before the first step."""
