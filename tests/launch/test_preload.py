"""The fork server looks for garbage neither while it imports nor, later, among what it imported."""

import subprocess
import sys

# Nothing is imported: each import tells whether garbage is collected, and fails.
CODE = """
import gc, sys

class Finder:
    def find_spec(self, name, *_):
        if name.startswith(("torch", "tensorboard")):
            seen.append(gc.isenabled())
            raise ImportError(name)

seen, before = [], gc.get_freeze_count()
sys.meta_path.insert(0, Finder())
import ddp_runner.launch.preload
print(set(seen), gc.isenabled(), gc.get_freeze_count() > before, flush=True)
"""


def test_garbage_is_collected_in_the_ranks_only() -> None:
    """A collection among millions of imported objects takes time, and copies pages in each rank."""
    answer = subprocess.run(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert answer.stdout == "{False} True True\n"
