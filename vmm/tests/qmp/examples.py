"""Checks configuration files against the published schema. usage: examples.py SCHEMA FILE..."""

import json
import sys

import jsonschema

with open(sys.argv[1], encoding="utf-8") as file:
    schema = json.load(file)
jsonschema.Draft202012Validator.check_schema(schema)
validator = jsonschema.Draft202012Validator(schema)
for name in sys.argv[2:]:
    with open(name, encoding="utf-8") as file:
        validator.validate(json.load(file))
# It refuses what the program refuses.
for wrong in [
    {"kernal": "x"},
    {"cpus": "x"},
    {"memory": {"size": "lots"}},
    {"iothread": [{"poll-max-ns": 1}]},
    {"iothread": [{"id": "a", "poll-policy": "fast"}]},
    {"disk": [{}]},
    {"qmp": "/run/vm.sock"},
]:
    assert not validator.is_valid(wrong), wrong
print("done")
