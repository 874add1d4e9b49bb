"""Layer of each module, as drawn in ARCHITECTURE.md, "Layers"."""

from __future__ import annotations

# The longest prefix decides.
LAYERS = {f"spotfleet.{name}": layer for layer, names in {
    0: "model errors codec addresses cost_export matching names plugins retry version words",
    1: "protocol config membership storage.schemes",
    2: "storage fleet.domain fleet.policy fleet.planner fleet.cost catalog.pricing simulate.values agent.policy "
       "providers providers.local.market providers.kit.mapping providers.aws.mapping "
       "providers.gcp.mapping",
    3: "fleet transport bundle interruptions report",
    4: "ssh catalog",
    5: "bootstrap simulate providers.builtin providers.kit providers.local providers.ssh providers.aws providers.azure "
       "providers.gcp",
    6: "worker",
    7: "agent dispatcher train",
    8: "api verify ray",
    9: "cli",
}.items() for name in names.split()} | {"spotfleet": 9}  # fmt: skip
# Folders without clock, socket, thread, file, random number, SDK; and so are the modules right below the package.
PURE = [f"spotfleet.{name}" for name in (
    "protocol", "membership", "fleet.domain", "fleet.policy", "fleet.planner", "fleet.cost", "report",
    "catalog.pricing", "simulate.values", "agent.policy", "providers.local.market", "providers.kit.mapping",
    "providers.aws.mapping", "providers.gcp.mapping")]
ENGINES = {"train"}  # each may import `worker`, `protocol`, `storage` and the modules right below the package
EFFECTS = {
    "aiohttp", "asyncio", "datetime", "logging", "multiprocessing", "os", "pathlib", "random", "secrets", "select",
    "shutil", "signal", "socket", "sqlite3", "ssl", "subprocess", "sys", "tempfile", "threading", "time", "torch",
    "urllib", "uuid",
}  # fmt: skip
SDKS = {"boto3", "botocore", "google", "azure", "ray", "xgboost", "fabric", "obstore"}


def layer(module: str) -> int:
    return LAYERS[next(n for n in sorted(LAYERS, key=len, reverse=True) if module == n or module.startswith(n + "."))]
