//! Builds the embedded guest with the compiler that builds everything else: the guest is a program
//! without the standard library, linked at a fixed address by its own linker script.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=guest");
    println!("cargo::rerun-if-changed=src/pattern.rs");
    println!("cargo::rerun-if-changed=guest.ld");
    println!("cargo::rustc-check-cfg=cfg(has_guest)");
    let var = |name: &str| env::var(name).unwrap_or_default();
    // The guest is for x86_64 and needs a `core` for it, which the target's own is.
    if var("CARGO_CFG_TARGET_ARCH") != "x86_64" || var("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    let image = PathBuf::from(var("OUT_DIR")).join("guest.elf");
    let source = PathBuf::from(var("CARGO_MANIFEST_DIR"));
    let mut link_script = OsString::from("link-arg=-T");
    link_script.push(source.join("guest.ld"));
    let mut command = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()));
    command
        .args(["--edition=2024", "--crate-name=guest", "--crate-type=bin"])
        .arg(format!("--target={}", var("TARGET")))
        .args(["-Copt-level=3", "-Cpanic=abort", "-Ccodegen-units=1"])
        .args([
            "-Cdebuginfo=0",
            "-Cstrip=symbols",
            "-Cdebug-assertions=off",
            "-Coverflow-checks=off",
        ])
        .args([
            "-Crelocation-model=static",
            "-Ccode-model=small",
            "-Cforce-unwind-tables=no",
        ])
        .args(["-Cdefault-linker-libraries=no"])
        .args([
            "-Clink-arg=-nostdlib",
            "-Clink-arg=-nostartfiles",
            "-Clink-arg=-static",
            "-Clink-arg=-no-pie",
        ])
        .args([
            "-Clink-arg=-Wl,--build-id=none",
            "-Clink-arg=-Wl,--gc-sections",
            "-Clink-arg=-Wl,-z,norelro",
        ])
        .args(["-Clink-arg=-Wl,-n"])
        .arg("-C")
        .arg(link_script)
        .arg("-o")
        .arg(&image)
        .arg(source.join("guest/main.rs"));
    let output = match command.output() {
        Ok(output) => output,
        Err(error) => panic!("cannot run the Rust compiler to build the guest: {error}"),
    };
    let messages = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        panic!("the guest does not build:\n{messages}");
    }
    for line in messages.lines() {
        println!("cargo::warning={line}");
    }
    println!("cargo::rustc-env=GUEST_ELF={}", image.display());
    println!("cargo::rustc-cfg=has_guest");
}
