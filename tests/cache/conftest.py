"""Kernels that a CPU runs."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["reference", "numba"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)
