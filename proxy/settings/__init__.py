"""The settings of the proxy: one typed tree, read from a file, the environment and flags."""

from proxy.settings.groups import proof_folder, state_folder
from proxy.settings.settings import (
    ENV_PREFIX,
    GROUPS,
    Settings,
    SettingsError,
    lends_credentials,
    load_settings,
    refuse_open_proxy,
    refuse_split_memory,
)

__all__ = [
    "ENV_PREFIX",
    "GROUPS",
    "Settings",
    "SettingsError",
    "lends_credentials",
    "load_settings",
    "proof_folder",
    "refuse_open_proxy",
    "refuse_split_memory",
    "state_folder",
]
