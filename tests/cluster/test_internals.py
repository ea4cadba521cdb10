"""Fails first when a Ray upgrade moves what we use of its internals."""

from ray._private.ray_logging import global_worker_stdstream_dispatcher

from app.orchestration.internals import hush


def test_the_raylets_messages_have_a_handler_that_can_be_removed():
    handlers = global_worker_stdstream_dispatcher.handlers
    assert "ray_print_logs" in [handler[0] if isinstance(handler, tuple) else handler for handler in handlers]
    hush()
