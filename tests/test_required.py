"""Frameworks that are missing or too old."""

import importlib
from importlib import metadata

import pytest

from graphshard.errors import IntegrationError
from graphshard.integrations import required


@pytest.mark.parametrize(
    ("installed", "what"),
    [
        (None, "accelerate is not installed"),
        ("1.5.2", r"accelerate 1\.5\.2 is here"),
        ("0.34.0.dev0", r"accelerate 0\.34\.0\.dev0 is here"),
    ],
)
def test_what_to_install(monkeypatch, installed, what):
    def version(package):
        if installed is None:
            raise metadata.PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(required, "version", version)
    with pytest.raises(IntegrationError, match=rf"GS1301: {what}, and 1\.6 or newer is needed"):
        importlib.import_module("graphshard.integrations.accelerate")


@pytest.mark.parametrize("installed", ["1.6", "1.15.0", "2.0rc1", "2"])
def test_new_enough(monkeypatch, installed):
    monkeypatch.setattr(required, "version", lambda package: installed)
    required.require("accelerate", (1, 6))
