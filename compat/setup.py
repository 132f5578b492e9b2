"""Refuses to install over upstream's wheel: both provide the package `mooncake`, and pip would let
the later one overwrite the earlier one's files without a word.

It looks into the environment that is installed into, and not only where this build can import from:
pip builds in an environment of its own, which does not see it.
"""

import site
import sys
import sysconfig
from importlib.metadata import distributions

folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
if site.ENABLE_USER_SITE:
    folders.append(site.getusersitepackages())
for found in distributions(path=list(dict.fromkeys(folders))):
    name = (found.metadata["Name"] or "").lower().replace("_", "-")
    if name.startswith("mooncake-transfer-engine"):
        raise SystemExit(
            f"{name} is installed and provides the package `mooncake`, too. "
            f"Remedy: pip uninstall {name}, then install this again"
        )

from setuptools import setup  # noqa: E402 - after the look, which needs nothing but Python

setup()
