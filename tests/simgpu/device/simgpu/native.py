"""Loads the compiled library, whose path SIMGPU_LIBRARY gives."""

import os
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import torch


def _load() -> ModuleType:
    path = os.environ.get("SIMGPU_LIBRARY")
    if not path:
        raise RuntimeError(
            "SIMGPU_LIBRARY names no library: tests/helpers/simgpu_build.py builds it"
        )
    torch.utils.rename_privateuse1_backend("simgpu")
    loader = ExtensionFileLoader("_simgpu", path)
    spec = spec_from_loader("_simgpu", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


library = _load()
