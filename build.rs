//! Link settings of the shared library.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    // The number is that of the C ABI (`ABI` in src/ffi/version.rs), so that a program finds the library that it was
    // linked against. Which symbols are exported is rustc's choice: those marked `no_mangle`, which are the kvf_* ones;
    // tests/abi/header.rs checks it.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libkvferry.so.1");
}
