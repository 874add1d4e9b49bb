"""Terraform's providers without their binaries: recorded schemas, and a server that answers with them.

    used.py       resources and data sources that `terraform/` uses
    extract.py    writes aws.json, google.json and azurerm.json: reduced schemas of these, with their source in each
    plugin.py     server of the provider plugin protocol: gives the schemas, and accepts whatever they allow

Terraform itself checks a configuration against a provider's schema: names of arguments, types, what is required. With
`mock_provider` it also plans, by the schema alone. Neither shows which values a cloud accepts.
"""
