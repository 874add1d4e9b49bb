"""boto3's clients, made in a fifth of the time: in this process botocore reads and builds what does not change once."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def make_clients_quickly() -> None:
    """From now on, in this process. A client is as ever one's own: its credentials, settings, connections and events.

    Shared are the loader with the models it has read (megabytes of JSON), the model of a service, and the class of its
    clients, with a method for each of hundreds of operations, and what events are called.
    """
    import botocore.session
    from botocore.client import ClientCreator
    from botocore.hooks import EventAliaser

    loader = botocore.session.create_loader()
    botocore.session.create_loader = lambda search_path_string=None: loader
    model, class_of = ClientCreator._load_service_model, ClientCreator._create_client_class
    models: dict[Any, Any] = {}
    classes: dict[Any, type] = {}

    def load_service_model(self: Any, service_name: str, api_version: str | None = None) -> Any:
        asked = (service_name, api_version)
        if asked not in models:
            models[asked] = model(self, service_name, api_version)
        return models[asked]

    def create_client_class(self: Any, service_name: str, service_model: Any) -> type:
        if service_name not in classes:
            classes[service_name] = class_of(self, service_name, service_model)
        return classes[service_name]

    names: dict[str, str] = {}  # names of events; what they are called otherwise is one constant list
    other_name = EventAliaser._alias_event_name

    def alias_event_name(self: Any, event_name: str) -> str:
        if event_name not in names:
            names[event_name] = other_name(self, event_name)
        return names[event_name]

    EventAliaser._alias_event_name = alias_event_name
    ClientCreator._load_service_model = load_service_model
    ClientCreator._create_client_class = create_client_class
