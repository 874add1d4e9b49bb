"""Section `aws` of the fleet file.

    spec.py      its contents as values, and the configuration that holds them     schema.py   its keys
    values.py    checks of one value each                                          reader.py   rules of several keys
"""
