"""
Runs at the start of Python in children of a process that called `shardkeep.dcp.install()`.

The first entry of their PYTHONPATH is this folder. Every Python process of the job runs this file, so it imports nothing:
it adds a finder that installs when torch's checkpoint package is first imported. Then it runs the `sitecustomize` that
Python would have found without this folder.
"""

# ruff: noqa: INP001 - not a package: Python finds this file by its folder

import os
import sys


class Waiting:
    """Waits for the first import of torch's checkpoint, and installs then."""

    awaits = (
        "torch.distributed.checkpoint",
        "torch.distributed._state_dict_utils",
        "torch.distributed._shard.checkpoint",
    )

    def __init__(self) -> None:
        self.done = False

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        """Return what the installed finder says, or None for any other import."""
        if self.done or not fullname.startswith(self.awaits):
            return None
        self.done = True  # and stays where it is: Python is going through the list
        try:
            from shardkeep.dcp_install import install_if_asked  # noqa: PLC0415 - not before it is needed
        except ImportError as exc:
            import warnings  # noqa: PLC0415 - not before it is needed

            warnings.warn(f"{fullname} stays torch's: shardkeep cannot be imported here ({exc})", stacklevel=2)
            return None
        hook = install_if_asked()
        return None if hook is None else hook.find_spec(fullname, path, target)


def _run_the_next_one() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    others = [folder for folder in sys.path if os.path.abspath(folder) != here]
    on_disk = next((each for each in sys.meta_path if getattr(each, "__name__", "") == "PathFinder"), None)
    spec = None if on_disk is None else on_disk.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec  # noqa: PLC0415 - seldom needed

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, Waiting())
_run_the_next_one()
