//! Compiles the filters of system calls, `resources/seccomp/ARCH.json`, to BPF: a VM starts faster when its
//! program has not to do it.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use seccompiler::{BpfMap, TargetArch};
use serde_json::Value;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../resources/seccomp");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", folder.display());
    let arch = std::env::var("CARGO_CFG_TARGET_ARCH")?;
    let source = folder.join(format!("{arch}.json"));
    let filters = match source.exists() {
        true => extended(&std::fs::read_to_string(source)?)?,
        // A processor without lists: nothing is compiled in, and the program says so.
        false => "{}".to_owned(),
    };
    let mut code = format!("pub(super) const SOURCE: &str = {filters:?};\n");
    for (name, action) in [("TRAP", "trap"), ("LOG", "log")] {
        let programs = compile(&filters, action, &arch)?;
        write(&mut code, name, &programs)?;
    }
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    Ok(std::fs::write(out.join("seccomp.rs"), code)?)
}

/// The lists, each with what the list named in its `extends` has.
fn extended(filters: &str) -> Result<String, Box<dyn std::error::Error>> {
    let mut lists: Value = serde_json::from_str(filters)?;
    let as_written = lists.clone();
    for list in lists
        .as_object_mut()
        .ok_or("the lists are no object")?
        .values_mut()
    {
        let list = list.as_object_mut().ok_or("a list is no object")?;
        let Some(base) = list.remove("extends") else {
            continue;
        };
        let base = base.as_str().ok_or("`extends` is no name")?;
        let more = as_written[base]["filter"]
            .as_array()
            .ok_or("`extends` names no list")?;
        let rules = list["filter"]
            .as_array_mut()
            .ok_or("a list without rules")?;
        rules.extend(more.iter().cloned());
    }
    Ok(lists.to_string())
}

/// The filters, with `action` for a call that is in no list.
fn compile(filters: &str, action: &str, arch: &str) -> Result<BpfMap, Box<dyn std::error::Error>> {
    let mut lists: Value = serde_json::from_str(filters)?;
    let lists_by_name = lists.as_object_mut().ok_or("the lists are no object")?;
    if lists_by_name.is_empty() {
        return Ok(BpfMap::new());
    }
    for list in lists_by_name.values_mut() {
        list["mismatch_action"] = action.into();
    }
    let text = lists.to_string();
    let arch = TargetArch::try_from(arch)?;
    Ok(seccompiler::compile_from_json(text.as_bytes(), arch)?)
}

/// Writes the programs as a table of the type that `seccomp/mod.rs` has for it.
fn write(code: &mut String, name: &str, programs: &BpfMap) -> std::fmt::Result {
    let mut sorted: Vec<_> = programs.iter().collect();
    sorted.sort_by_key(|(list, _)| list.as_str());
    writeln!(code, "pub(super) static {name}: Table = &[")?;
    for (list, program) in sorted {
        writeln!(code, "({list:?}, &[")?;
        for seccompiler::sock_filter {
            code: op,
            jt,
            jf,
            k,
        } in program
        {
            writeln!(code, "instruction({op}, {jt}, {jf}, {k}),")?;
        }
        writeln!(code, "]),")?;
    }
    writeln!(code, "];")
}
