"""moto in less time: what it works out anew for each request and never changes, it does once."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def make_moto_quickly() -> None:
    """From now on, in this process."""
    import xmltodict
    from moto import backends
    from moto.core import responses
    from moto.kms import models

    modules = list(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: modules
    responses.method_names_from_class = cache(responses.method_names_from_class)
    names: Any = xmltodict
    names._validate_name = cache(names._validate_name)  # for each element of each answer
    made: Any = models.generate_private_key
    models.generate_private_key = cache(made)  # one RSA key for all KMS keys of a kind: nothing is signed with them
