//! The C header: it is what `src/ffi` says, and it compiles alone as C and as C++.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::skip::skipped;

const HEADER: &str = "include/kvferry.h";

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The header as it follows from the sources: first what all use, then one noun after the other.
fn generated() -> String {
    let mut config = cbindgen::Config::from_file(root().join("include/cbindgen.toml")).unwrap();
    // The one number, of Cargo.toml.
    let version = env!("CARGO_PKG_VERSION");
    config.after_includes = config.after_includes.map(|text| text.replace("@VERSION@", version));
    let names = [
        "status",
        "version",
        "ucx",
        "buffer",
        "log",
        "agent",
        "agent_transfer",
        "listener",
        "handshake",
        "worker",
        "scheduler",
        "aggregator",
        "report",
        "stats",
        "plan",
        "settings",
    ];
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in names {
        builder = builder.with_src(root().join(format!("src/ffi/{name}.rs")));
    }
    let mut text = Vec::new();
    builder.generate().unwrap().write(&mut text);
    // What a Rust caller must promise is the convention at the header's top, so that C needs no section for it.
    let text = String::from_utf8(text).unwrap();
    let mut lines: Vec<&str> = Vec::new();
    let mut skipping = false;
    for line in text.lines() {
        let doc = line.trim_start().strip_prefix("//").map(str::trim);
        if doc == Some("# Safety") {
            skipping = true;
            if lines.last().is_some_and(|last| last.trim() == "//") {
                lines.pop();
            }
        } else if doc.is_none() || !skipping {
            skipping = false;
            lines.push(line);
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_committed_header_is_fresh() {
    let path = root().join(HEADER);
    let fresh = generated();
    if std::env::var_os("KVFERRY_BLESS").is_some() {
        fs::write(&path, &fresh).unwrap();
    }
    let committed = fs::read_to_string(&path).unwrap_or_default();
    let differing = committed.lines().zip(fresh.lines()).position(|(a, b)| a != b);
    assert!(
        committed == fresh,
        "{HEADER} differs from src/ffi (first at line {:?}); run `KVFERRY_BLESS=1 cargo test --test abi header` and commit it",
        differing.map(|n| n + 1)
    );
}

fn compile(compiler: &str, standard: &str, language: &str) -> bool {
    let found = Command::new(compiler).arg("--version").output().is_ok_and(|out| out.status.success());
    if !found {
        return false;
    }
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // Twice, so that the guard is tested too; alone, so that it includes what it needs.
    let source = dir.join(format!("header.{}", if language == "c" { "c" } else { "cpp" }));
    fs::write(&source, "#include <kvferry.h>\n#include <kvferry.h>\nint kvf_test_unit;\n").unwrap();
    let out = Command::new(compiler)
        .args([standard, "-x", language, "-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"])
        .arg("-I")
        .arg(root().join("include"))
        .arg(&source)
        .output()
        .unwrap();
    assert!(out.status.success(), "{compiler} {standard}:\n{}", String::from_utf8_lossy(&out.stderr));
    true
}

#[test]
fn the_header_compiles_alone_as_c11() {
    assert!(compile("cc", "-std=c11", "c"), "no C compiler `cc` was found; a build of kvferry needs one");
}

#[test]
fn the_header_compiles_alone_as_cpp17() {
    if !compile("c++", "-std=c++17", "c++") {
        skipped("no C++ compiler `c++` was found");
    }
}

/// The functions that the header declares.
fn declared(header: &str) -> BTreeSet<String> {
    let code: String =
        header.lines().filter(|line| !line.trim_start().starts_with(['*', '/'])).collect::<Vec<_>>().join("\n");
    let words = code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '('));
    words
        .filter_map(|word| word.split_once('(').map(|(name, _)| name))
        .filter(|name| name.starts_with("kvf_"))
        .map(str::to_owned)
        .collect()
}

#[test]
fn the_library_exports_what_the_header_declares_and_nothing_else() {
    let library =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join(profile()).join("deps/libkvferry.so");
    let out = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output();
    let out = match out {
        Ok(out) => out,
        Err(e) => {
            skipped(&format!("`nm` of the C tool chain cannot be run: {e}"));
            return;
        }
    };
    assert!(out.status.success(), "nm {}: {}", library.display(), String::from_utf8_lossy(&out.stderr));
    let text = String::from_utf8(out.stdout).unwrap();
    let exported: BTreeSet<String> =
        text.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect();
    assert_eq!(exported, declared(&fs::read_to_string(root().join(HEADER)).unwrap()));
}

fn profile() -> &'static str {
    if cfg!(debug_assertions) { "debug" } else { "release" }
}
