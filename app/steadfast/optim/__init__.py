"""Optimizers and learning rate schedules, of this program and of users."""
