"""Parts of the training loop: state of a worker, validation, periodic acts, and checks before the first step."""
