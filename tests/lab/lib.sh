# What the lab's scripts share. Sourced, never run.
# shellcheck shell=bash

set -euo pipefail

lab_source=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lab_repository=$(cd "$lab_source/../.." && pwd)

# Everything downloaded or built goes here, keyed by version; it can be removed at any time.
lab_dir=${POLLUX_LAB_DIR:-${CARGO_TARGET_DIR:-$lab_repository/target}/lab}
# The newest of everything, under fixed names; what tests use.
lab_current=$lab_dir/current

# A fixed time for every file that the lab makes, so that what it makes can be compared.
export SOURCE_DATE_EPOCH=1700000000
export LC_ALL=C

say() { printf 'lab: %s\n' "$*" >&2; }

die() {
    say "$*"
    exit 1
}

# Sets `scratch`, a directory that is gone when the script ends.
make_scratch() {
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064  # the value of now is meant
    trap "rm -rf '$scratch'" EXIT
}

# key WORD_OR_FILE...: a short name for the words, for the contents of the files, and for the script
# that asks, so that what is built anew when one of them changes has another name.
key() {
    local item
    for item in "$0" "${BASH_SOURCE[0]}" "$@"; do
        if [[ -f $item ]]; then cat "$item"; else printf '%s\n' "$item"; fi
    done | sha256sum | cut -c1-12
}

# publish FILE NAME: makes FILE what tests find as NAME. The link is relative and replaced at once.
publish() {
    local link=$lab_current/$2
    mkdir -p "$(dirname "$link")"
    ln -sfnr "$1" "$link.new"
    mv -T "$link.new" "$link"
}

# kernel_dir FLAVOUR: where `kernels` put the newest kernel of that flavour.
kernel_dir() {
    readlink -f "$lab_current/kernel-$1" || die "no $1 kernel yet: run tests/lab/prepare"
}

# initramfs OUT KERNEL_DIR INIT MODULE...: an initramfs of busybox, the script INIT as /init, and
# the modules with all they need in /modules, numbered in the order of loading. A module that the
# kernel has built in is left out.
initramfs() {
    local out=$1 kernel=$2 init=$3
    shift 3
    local root release module file number=100
    root=$(mktemp -d -p "$scratch")
    release=$(cat "$kernel/release")
    mkdir -p "$root"/{bin,dev,lib64,mnt,modules,proc,run,sys,tmp}
    cp "$(command -v busybox)" "$root/bin/busybox"
    cp "$init" "$root/init"
    chmod 755 "$root/init"

    declare -A taken=()
    for module; do
        while read -r _ file _; do
            [[ $file == /* && -z ${taken[$file]:-} ]] || continue
            taken[$file]=1
            number=$((number + 1))
            local name=$number-${file##*/}
            case $file in
                *.ko.xz) xz -dc "$file" >"$root/modules/${name%.xz}" ;;
                *.ko.zst) zstd -qdc "$file" >"$root/modules/${name%.zst}" ;;
                *) cp "$file" "$root/modules/$name" ;;
            esac
        done < <(modprobe -d "$kernel" -S "$release" -C /dev/null --show-depends "$module" ||
            say "no module $module in $release" >&2)
    done

    find "$root" -exec touch -hd "@$SOURCE_DATE_EPOCH" {} +
    # Not compressed: unpacking is slower in emulation than reading.
    (cd "$root" && find . -print0 | sort -z |
        cpio --quiet --null --create --format=newc --reproducible --owner=0:0) >"$out.new"
    mv "$out.new" "$out"
}
