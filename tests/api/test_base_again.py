"""A fleet on a base that is brought up again without its base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spotfleet.api.lifecycle.up import _change
from spotfleet.errors import UsageError
from spotfleet.plugins import BASE_TAG
from tests.support.aws.aws_laptop import laptop


def test_a_command_that_does_not_name_the_fleets_base_gets_the_option_to_add(tmp_path: Path):
    folder = laptop(tmp_path, reached=True).folder
    spec = folder.record.spec
    folder.update(spec=replace(spec, tags={BASE_TAG: "lab"}))
    with pytest.raises(UsageError, match="fleet 'f' is up on base lab, which this command does not name") as caught:
        _change(folder, spec)
    assert "--discover lab" in caught.value.hint
    with pytest.raises(UsageError, match="tags cannot change"):
        _change(folder, replace(spec, tags={BASE_TAG: "lab", "team": "x"}))
