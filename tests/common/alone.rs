//! Tests that count the threads of their process, or their processor time.

#![allow(unused_imports, unused_macros)]

use std::process::Command;

/// Runs the test that begins with it alone in a process, whatever runs the tests.
macro_rules! alone {
    () => {
        if !$crate::common::alone::is_alone() {
            return;
        }
    };
}
pub(crate) use alone;

/// Whether this process runs no other test. Otherwise, the calling test has passed in a process of its own, and returns.
///
/// nextest starts a process per test; `cargo test` runs the tests of a binary as threads of one.
pub fn is_alone() -> bool {
    const ALONE: &str = "KVFERRY_TEST_ALONE";
    let thread = std::thread::current();
    // The harness names a thread after its test. On the main thread, it runs one test at a time.
    let test = thread.name().unwrap();
    if test == "main" || ["NEXTEST", ALONE].iter().any(|name| std::env::var_os(name).is_some()) {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let status = command.args(["--exact", test, "--nocapture"]).env(ALONE, "1").status().unwrap();
    assert!(status.success(), "{test}: {status}");
    false
}
