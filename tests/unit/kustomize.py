"""Composes kustomizations in Python: tests need neither kubectl nor kustomize.

It reads the subset that deploy/kubernetes uses: `resources`, `patches` by `path` (strategic merge), and
`configMapGenerator` with `files`. Another field is an error, so that nothing is left out silently.
"""

from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]

_FIELDS = {"apiVersion", "kind", "resources", "patches", "configMapGenerator"}
_MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
"""Lists that a strategic merge joins by the key of their items; other lists are replaced."""


def compose(folder: Path) -> list[Manifest]:
    """The manifests of a kustomization.

    Raises:
        ValueError: it uses a field that this module does not read, or patches a manifest that it lacks.
    """
    [path] = folder.glob("kustomization.y*ml")
    [kustomization] = read_manifests(path)
    if unknown := set(kustomization) - _FIELDS:
        raise ValueError(f"{path} has fields that are not read here: {sorted(unknown)}")
    manifests: list[Manifest] = []
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        manifests += compose(path) if path.is_dir() else read_manifests(path)
    manifests += [_config_map(folder, each) for each in kustomization.get("configMapGenerator", ())]
    for patch in kustomization.get("patches", ()):
        if set(patch) != {"path"}:
            raise ValueError(f"{folder} has patches that are not given by `path`")
        for change in read_manifests(folder / patch["path"]):
            _apply(manifests, change)
    return manifests


def read_manifests(path: Path) -> list[Manifest]:
    """The documents of a YAML file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def name_of(manifest: Manifest) -> str:
    """Kind and name of a manifest, for example `Service/engine`."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def _config_map(folder: Path, generator: Manifest) -> Manifest:
    options = generator.get("options", {})
    if set(generator) - {"name", "files", "options"} or not options.get("disableNameSuffixHash"):
        raise ValueError(f"{folder} has a ConfigMap with a hash in its name")
    metadata = {"name": generator["name"], "labels": options.get("labels", {})}
    data = {Path(name).name: (folder / name).read_text() for name in generator["files"]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


def _apply(manifests: list[Manifest], change: Manifest) -> None:
    for index, manifest in enumerate(manifests):
        if name_of(manifest) == name_of(change):
            manifests[index] = _merged(manifest, change)
            return
    raise ValueError(f"nothing to patch is called {name_of(change)}")


def _merged(value: Any, change: Any, key: str = "") -> Any:
    """A value after a strategic merge; `key` is the name of its field."""
    if isinstance(value, dict) and isinstance(change, dict):
        result = value | {name: _merged(value.get(name), item, name) for name, item in change.items()}
        return {name: item for name, item in result.items() if item is not None}
    if isinstance(value, list) and isinstance(change, list) and key in _MERGE_KEYS:
        return _merged_items(value, change, _MERGE_KEYS[key])
    return change


def _merged_items(items: list[Manifest], changes: list[Manifest], key: str) -> list[Manifest]:
    """Kustomize's order: the changed items first, the unchanged ones after them."""
    before = {item[key]: item for item in items}
    merged = {change[key]: _merged(before.get(change[key], {}), change) for change in changes}
    return [*merged.values(), *(item for name, item in before.items() if name not in merged)]
