# What the scripts for s390x share. Sourced, never run.
# shellcheck shell=bash

source "$(dirname "${BASH_SOURCE[0]}")/../lab/lib.sh"

s390x_source=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Programs that run here in root/, what a guest boots in guest/: see `toolchain`.
s390x_prefix=$lab_current/s390x
# What cargo builds.
s390x_target=${CARGO_TARGET_DIR:-$lab_repository/target}/s390x

# Ends the script, with what would help, where the toolchain has not been fetched.
need_toolchain() {
    [[ -e $s390x_prefix/complete ]] || die "nothing for s390x yet: run tests/s390x/toolchain"
}

# Where the unpacked programs find the libraries that were unpacked with them.
s390x_libraries=$s390x_prefix/root/usr/lib/$(uname -m)-linux-gnu
