"""Rights, rules and names of a base: the files in `terraform/` say what the provider says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spotfleet.providers.aws import base
from spotfleet.providers.aws.mapping import names, policies

AWS = Path(__file__).parents[2] / "terraform" / "aws"


def statements(role: str) -> list[dict[str, Any]]:
    return base.files()["base.json"]["policies"][role]["Statement"]


def test_terraform_has_the_rights_rules_and_names_of_the_command_line():
    """`python -m spotfleet.providers.aws.base terraform/aws/data` writes them anew."""
    found = {path.name: json.loads(path.read_text()) for path in (AWS / "data").glob("*.json")}
    assert found == base.files()


def test_a_dispatcher_of_a_base_has_the_rights_of_a_fleet_s_own_for_the_base_s_tag():
    """Nothing but the tag differs: the base's name stands where a fleet's does."""
    asked = {"regions": ("us-east-1",), "account": "1", "host_role": "arn:h", "kms_key": "arn:aws:kms:r:1:key/k",
             "queue": True}
    own = policies.dispatcher(policies.Scope("f", **asked))  # type: ignore[arg-type]
    of_base = policies.dispatcher(policies.Scope("f", base=True, **asked))  # type: ignore[arg-type]
    assert of_base != own
    assert json.loads(json.dumps(of_base).replace(f"/{names.BASE}", f"/{names.FLEET}")) == own


def test_no_right_of_a_base_has_a_wildcard_and_each_change_is_bound_to_the_tag():
    for role in ("dispatcher", "host", "boundary"):
        assert not [a for s in statements(role) for a in s["Action"] if "*" in a]
    ending = next(s for s in statements("dispatcher") if s["Sid"] == "End")
    assert ending["Condition"] == {"StringEquals": {"aws:ResourceTag/spotfleet-base": "${name}"}}


def test_the_boundary_allows_what_both_roles_need_and_passes_on_no_foreign_role():
    documents = base.files()["base.json"]["policies"]
    both = policies.actions(documents["dispatcher"]) | policies.actions(documents["host"])
    assert policies.actions(documents["boundary"]) == both
    (passing,) = (s for s in statements("boundary") if "iam:PassRole" in s["Action"])
    assert passing["Resource"] == ["arn:${partition}:iam::${account}:role/spotfleet/*"]


def test_each_gpu_has_the_types_with_fewest_of_it():
    gpus = base.files()["gpus.json"]
    assert {"A10G", "L4", "T4"} <= gpus.keys()
    assert "g5.xlarge" in gpus["A10G"] and "g5.48xlarge" not in gpus["A10G"]
