"""Environment of the emulated cloud's processes: variables of the user's shell that may hold no credentials. Pure.

The cloud's daemon and all hosts get the variables listed here and no others, so that an exported password reaches a job
only by `envs:`, `secrets:`, `--env` or `--secret`. PASS names further ones: `SPOTFLEET_LOCAL_ENV="NAME,PREFIX*"`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

PASS = "SPOTFLEET_LOCAL_ENV"
NAMES = frozenset({
    "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP", "TERM", "COLUMNS",
    "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE",
    "http_proxy", "https_proxy", "no_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY",
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE", "PIP_CACHE_DIR", "PIP_NO_INDEX", "PIP_FIND_LINKS",
    "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
})
PREFIXES = ("LC_", "XDG_", "PYTHON", "SPOTFLEET_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "KMP_", "MKL_",
            "OPENBLAS_", "NUMEXPR_", "TORCH", "PYTORCH_", "TRITON_", "MALLOC_")
SECRET_NAME = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)  # as in NVIDIA_API_KEY
SECRET_VALUE = re.compile(r"://[^/\s]*@")  # a URL with a password, as of a proxy


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `environ` that the daemon of the cloud and its hosts get."""
    more = [pattern for pattern in re.split(r"[,\s]+", environ.get(PASS, "")) if pattern]
    return {name: value for name, value in environ.items() if _asked(name, more) or _harmless(name, value)}


def _asked(name: str, more: list[str]) -> bool:
    return any(name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern for pattern in more)


def _harmless(name: str, value: str) -> bool:
    known = name in NAMES or (name.startswith(PREFIXES) and not SECRET_NAME.search(name))
    return known and not SECRET_VALUE.search(value)
