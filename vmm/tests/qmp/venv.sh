#!/bin/sh
# Makes a Python environment with the clients that the tests use, once, under DIRECTORY; prints its interpreter.
# usage: venv.sh DIRECTORY
# Exit status 3: there is no Python, or the packages cannot be had; standard error says what.
set -u
dir=$1
packages='qemu.qmp==0.0.6 prometheus_client==0.26.0 jsonschema==4.26.0'
marker="$dir/made-of"

if [ "$(cat "$marker" 2>/dev/null)" != "$packages" ]; then
    rm -rf "$dir"
    python3 -m venv "$dir" >&2 || { echo 'python3 with venv is needed' >&2; exit 3; }
    # shellcheck disable=SC2086 # a list of packages
    "$dir/bin/pip" install --quiet --disable-pip-version-check $packages >&2 ||
        { echo "pip cannot install $packages" >&2; rm -rf "$dir"; exit 3; }
    printf '%s' "$packages" > "$marker"
fi
printf '%s\n' "$dir/bin/python"
