//! Tests that a machine makes skip something. Each says so on the standard error, past the harness, which shows nothing of
//! tests that pass.

#![allow(dead_code)]

use std::io::Write;

/// Says that something was skipped, and why.
pub fn skipped(why: &str) {
    let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
}

/// Says that a test was skipped for want of `what`, or fails it where `KVFERRY_REQUIRE` names that.
pub fn skip(what: &str, why: &str) {
    let required = std::env::var("KVFERRY_REQUIRE").unwrap_or_default();
    assert!(!required.split([',', ' ']).any(|r| r == what), "{what} is required and not there: {why}");
    skipped(&format!("(needs {what}) {why}"));
}
