"""Refuses to install over upstream's wheel: both provide the package `mooncake`, and pip would let
the later one overwrite the earlier one's files without a word."""

from importlib.metadata import distributions

from setuptools import setup

for found in distributions():
    name = (found.metadata["Name"] or "").lower().replace("_", "-")
    if name.startswith("mooncake-transfer-engine"):
        raise SystemExit(
            f"{name} is installed and provides the package `mooncake`, too. "
            f"Remedy: pip uninstall {name}, then install this again with --no-build-isolation"
        )

setup()
