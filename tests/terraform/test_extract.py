"""The extractor of schemas, on a package as cdktf generates them."""

from __future__ import annotations

from tests.terraform.schema.extract import CdktfFile

SCRIPT = """
function thingRuleToHclTerraform(struct) {
    const attrs = {
        ports: {
            value: cdktf.listMapperHcl(cdktf.stringToHclTerraform, false)(struct.ports),
            isBlock: false,
            type: "set",
            storageClassType: "stringList",
        },
    };
    // remove undefined attributes
}
class Thing extends cdktf.TerraformResource {
    // self_link - computed: true, optional: false, required: false
    get selfLink() {
        return this.getStringAttribute('self_link');
    }
    // parts - computed: true, optional: false, required: false
    get parts() {
        return this._parts;
    }
    synthesizeHclAttributes() {
        const attrs = {
            id: {
                value: cdktf.stringToHclTerraform(this._id),
                isBlock: false,
                type: "simple",
                storageClassType: "string",
            },
            display_name: {
                value: cdktf.stringToHclTerraform(this._displayName),
                isBlock: false,
                type: "simple",
                storageClassType: "string",
            },
            rule: {
                value: cdktf.listMapperHcl(thingRuleToHclTerraform, true)(this._rule.internalValue),
                isBlock: true,
                type: "list",
                storageClassType: "ThingRuleList",
            },
            only_rule: {
                value: thingRuleToHclTerraform(this._onlyRule.internalValue),
                isBlock: true,
                type: "list",
                storageClassType: "ThingRuleList",
            },
            timeouts: {
                value: thingRuleToHclTerraform(this._timeouts.internalValue),
                isBlock: true,
                type: "struct",
                storageClassType: "ThingTimeouts",
            },
        };
        // remove undefined attributes
    }
}
"""
TYPES = """
export interface ThingConfig extends cdktf.TerraformMetaArguments {
    readonly id?: string;
    readonly displayName: string;
    readonly rule: ThingRule[] | cdktf.IResolvable;
    readonly onlyRule?: ThingRule;
    readonly timeouts: ThingTimeouts;
}
export interface ThingRule {
    readonly ports: string[];
}
"""


def test_attributes_and_blocks_are_read_with_what_they_require(tmp_path):
    (tmp_path / "index.js").write_text(SCRIPT)
    (tmp_path / "index.d.ts").write_text(TYPES)
    rule = {"attributes": {"ports": {"type": ["set", "string"], "required": True}}, "block_types": {}}
    assert CdktfFile(tmp_path).root() == {
        "attributes": {
            "id": {"type": "string", "optional": True, "computed": True},
            "display_name": {"type": "string", "required": True},
            "self_link": {"type": "string", "computed": True},
            "parts": {"type": "dynamic", "computed": True},
        },
        "block_types": {
            "rule": {"nesting_mode": "list", "block": rule, "min_items": 1},
            "only_rule": {"nesting_mode": "list", "block": rule, "max_items": 1},
            "timeouts": {"nesting_mode": "single", "block": rule},
        },
    }
