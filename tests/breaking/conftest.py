"""Faults that are known and open: strict, so that a mended one leaves the list."""

from __future__ import annotations

import pytest

OPEN = {
    "test_a_setting_made_by_another_thread_survives",
    "test_another_thread_draws_host_numbers",
    "test_another_threads_numbers_are_not_drawn_twice",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "breaking" in item.path.parts and item.name in OPEN:
            item.add_marker(pytest.mark.xfail(strict=True, reason="open: docs/plan.md, issue 3"))
