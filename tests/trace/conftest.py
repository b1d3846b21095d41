"""The models of the traced calls."""

import pytest

from tests.models import draft_of, tiny


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def draft(target):
    return draft_of(target, "near", noise=0.15)
