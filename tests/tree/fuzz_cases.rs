//! Every kept case of every fuzz target: `fuzz/corpus` (small seeds that reach far) and `fuzz/regressions` (what once
//! failed), through the same functions that the fuzzers call.

#[path = "../../fuzz/src/lib.rs"]
mod targets;

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

/// The files of a folder by name, and their contents. None if there is no such folder.
fn cases(folder: &str, target: &str) -> Vec<(String, Vec<u8>)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz").join(folder).join(target);
    let Ok(entries) = fs::read_dir(path) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|file| (file.display().to_string(), fs::read(&file).unwrap())).collect()
}

#[test]
fn every_kept_case_keeps_the_rules() {
    for (target, run) in targets::TARGETS {
        let seeds = cases("corpus", target);
        assert!(!seeds.is_empty(), "target {target} has no seeds");
        for (name, bytes) in seeds.into_iter().chain(cases("regressions", target)) {
            if std::panic::catch_unwind(|| run(&bytes)).is_err() {
                panic!("{name} breaks a rule, which is told above");
            }
        }
    }
    assert!(targets::scheduler::EVICTED.load(Ordering::Relaxed) > 0, "no case evicts conversations");
}

#[test]
fn every_target_has_a_fuzzer() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let mut files: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    files.sort();
    assert_eq!(files, targets::TARGETS.iter().map(|(name, _)| name.to_string()).collect::<Vec<_>>());
}

/// Without coverage to guide them, but wherever the tests run. `KVFERRY_FUZZ_CASES` is how many for each target.
#[test]
fn bytes_at_random_keep_the_rules() {
    let count: u64 = std::env::var("KVFERRY_FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(60);
    for (target, run) in targets::TARGETS {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for number in 0..count {
            let len = next() % 900;
            let bytes: Vec<u8> = (0..len).map(|_| (next() >> 24) as u8).collect();
            if std::panic::catch_unwind(|| run(&bytes)).is_err() {
                let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{target}-{number}"));
                fs::write(&path, &bytes).unwrap();
                panic!("target {target} breaks a rule, which is told above, with {}", path.display());
            }
        }
    }
}
