//! Raw bindings to UCX's UCP interface, generated at build time from the installed headers.
//!
//! Nothing is linked. [`Ucp`] holds the functions of a libucp that was opened at run time; every
//! function is a `Result` field, so a libucp that lacks one still opens, and the caller decides what it
//! can do without. The method of the same name panics when the function is missing: check the field
//! first.
//!
//! Enums are integer newtypes, because a newer libucp may return values that the headers of the build
//! do not list. `kvferry`'s `src/ucx` is the only user and gives the safe interface.

#![allow(
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unused_qualifications,
    rustdoc::all,
    clippy::all,
    clippy::pedantic,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing
)]

include!(concat!(env!("OUT_DIR"), "/bindings.rs"));

pub use libloading;

impl Ucp {
    /// The address of a symbol that the bindings do not list, or `None` when the library and what it
    /// depends on lack it. `name` ends with a NUL byte.
    ///
    /// Nothing vouches for the symbol's type: the caller does, when it uses the address.
    pub fn symbol(&self, name: &[u8]) -> Option<*mut std::os::raw::c_void> {
        // SAFETY: the symbol is only looked up, as a plain address; using it is the caller's unsafe act.
        unsafe { self.__library.get::<*mut std::os::raw::c_void>(name) }.ok().map(|symbol| *symbol)
    }
}
