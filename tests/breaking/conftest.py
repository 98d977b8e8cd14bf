"""Faults that are known and open: strict, so that a mended one leaves the list."""

from __future__ import annotations

import pytest

OPEN = {
    "test_a_callback_argument_is_called",
    "test_a_dataclass_argument_changed",
    "test_a_host_scalar_written_through_data",
    "test_a_host_scalar_written_through_numpy",
    "test_a_module",
    "test_a_returned_table_is_the_table",
    "test_a_setting_made_by_another_thread_survives",
    "test_an_argument_that_is_a_view_of_a_buffer_the_forward_writes",
    "test_another_thread_draws_host_numbers",
    "test_another_threads_numbers_are_not_drawn_twice",
    "test_two_empty_results_are_recorded",
    "test_unregistered_layer_gets_a_hook",
    "test_unregistered_layers_weights_swapped_old_ones_kept",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "breaking" in item.path.parts and item.name in OPEN:
            item.add_marker(pytest.mark.xfail(strict=True, reason="open: docs/plan.md, issue 3"))
