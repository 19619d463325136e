"""The manifest's contract, as JSON Schema in manifest.schema.json, and the part of JSON Schema that it uses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("manifest.schema.json")
_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_KEYWORDS = frozenset(
    {
        "type", "const", "enum", "pattern", "minimum", "maximum", "required", "properties", "additionalProperties",
        "dependentRequired", "items", "minItems", "maxItems", "$ref", "description",
    }
)  # fmt: skip


def violations(manifest: Any) -> list[str]:
    """Every place at which `manifest` is not as manifest.schema.json has it, as `path: what was needed`."""
    schema = json.loads(PATH.read_text())
    head = {"$schema", "$id", "title", "$defs"}
    return _violations(manifest, {key: value for key, value in schema.items() if key not in head}, schema, "manifest")


def _violations(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    unknown = schema.keys() - _KEYWORDS
    assert not unknown, f"{PATH.name} uses {sorted(unknown)}, which nobody checks"
    if "$ref" in schema:
        return _violations(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, path)
    wanted = schema.get("type", [])
    names = [wanted] if isinstance(wanted, str) else wanted
    if names and not any(_has_type(value, name) for name in names):
        return [f"{path}: {' or '.join(names)} was needed, not {type(value).__name__}"]
    found = _wrong_value(value, schema, path)
    if isinstance(value, dict):
        found += _wrong_object(value, schema, root, path)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            found.append(f"{path}: {len(value)} entries")
        for place, item in enumerate(value):
            found += _violations(item, schema.get("items", {}), root, f"{path}[{place}]")
    return found


def _has_type(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))


def _wrong_value(value: Any, schema: dict[str, Any], path: str) -> list[str]:
    number = isinstance(value, int | float)
    wrong = [
        text
        for failed, text in (
            ("const" in schema and value != schema["const"], f"{schema.get('const')!r} was needed"),
            ("enum" in schema and value not in schema["enum"], f"one of {schema.get('enum')} was needed"),
            (
                isinstance(value, str) and not re.search(schema.get("pattern", ""), value),
                f"text like {schema.get('pattern')} was needed",
            ),
            (number and not schema.get("minimum", value) <= value <= schema.get("maximum", value), "out of range"),
        )
        if failed
    ]
    return [f"{path} = {value!r}: {text}" for text in wrong]


def _wrong_object(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], path: str) -> list[str]:
    needed = set(schema.get("required", []))
    for key, others in schema.get("dependentRequired", {}).items():
        needed |= set(others) if key in value else set()
    found = [f"{path}.{key}: is missing" for key in sorted(needed - value.keys())]
    others = schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in schema.get("properties", {}):
            found += _violations(item, schema["properties"][key], root, f"{path}.{key}")
        elif others is False:
            found.append(f"{path}.{key}: is not known")
        elif isinstance(others, dict):
            found += _violations(item, others, root, f"{path}.{key}")
    return found
