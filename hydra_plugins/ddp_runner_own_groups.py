"""The folders of the user's own groups come before ``conf/``, where Hydra would append them.

So an option of the user's counts where ours has its name, and a new option of ours changes nothing.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from ddp_runner.cli.compose import OWN_GROUPS


class OwnGroupsFirst(SearchPathPlugin):
    """Hydra calls it whenever it begins to compose."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Put the folders of the command in front, the first one first."""
        for folder in reversed(OWN_GROUPS):
            search_path.prepend("ddp_runner's command", folder)
